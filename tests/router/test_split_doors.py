"""The suites of the router's doors once more, through a handle whose other half is in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = [
    path.relative_to(HERE)
    for path in sorted(HERE.rglob("test_*.py"))
    if "tests.support.router.router_process" in path.read_text() and path != Path(__file__)
]


def test_the_suites_are_found() -> None:
    assert {suite.parts[0] for suite in SUITES} >= {"api", "requests", "text", "engine", "adapters"}
    assert len(SUITES) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_a_split_router(suite: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not deploy",
    ]
    result = subprocess.run(
        [*command, str(HERE / suite)],
        env={**os.environ, "TGIS_TESTS_ROUTER": "tests.support.router.split_router"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in (0, 5), result.stdout  # 5: all its tests are slow
