from collections.abc import Iterator

import pytest
import torch

from tests.support.cuda.poisoned import poisoned_memory


@pytest.fixture(autouse=True)
def _begin() -> Iterator[None]:
    torch.manual_seed(0)
    with poisoned_memory():
        yield
