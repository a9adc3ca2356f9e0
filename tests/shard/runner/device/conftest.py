"""Fixtures of tests of runners on devices."""

from collections.abc import Iterator

import pytest

from tests.support.cuda.poisoned import poisoned_memory


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with values that would break any step that reads them."""
    with poisoned_memory():
        yield
