"""Runs the suites of the router again, with an engine process and three router workers."""

from pathlib import Path

import pytest

from tests.support.router import split_router
from tests.support.suites import run_suite

HERE = Path(__file__).parent
# Modules that start routers.
STARTERS = ("tests.support.router.router_process", "tests.support.router.engine_api")
SUITES = [
    path.relative_to(HERE)
    for path in sorted(HERE.rglob("test_*.py"))
    if any(module in path.read_text() for module in STARTERS) and path != Path(__file__)
]
SPLIT = {"TGIS_TESTS_ROUTER": split_router.MODULE}


def test_the_suites_are_found() -> None:
    assert {suite.parts[0] for suite in SUITES} >= {"api", "requests", "text", "engine", "adapters"}
    assert len(SUITES) > 20


@pytest.mark.slow
def test_the_wire_of_a_split_router() -> None:
    run_suite(HERE / "api/fmaas/test_old_clients.py", SPLIT, [])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_a_split_router(suite: Path) -> None:
    run_suite(HERE / suite, SPLIT, ["-m", "not slow and not deploy"])
