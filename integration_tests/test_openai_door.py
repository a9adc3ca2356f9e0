"""The `openai` package against a launched service: what `make clients` runs for it."""

from collections.abc import Iterator

import pytest

from integration_tests.clients import use_openai
from integration_tests.clients.expectations import Check, Served
from integration_tests.clients.served import launch_served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with launch_served(tmp_path_factory.mktemp("served")) as (served, _):
        yield served


@pytest.mark.parametrize("check", use_openai.CHECKS, ids=lambda check: check.__name__)
def test_openai_package(check: Check, served: Served) -> None:
    check(served)
