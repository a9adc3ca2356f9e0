"""Suites that run again in another environment, and tests that do not apply there."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

NO_TESTS = 5  # pytest's exit status if all tests are deselected


def run_suite(suite: Path, env: Mapping[str, str], options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(suite)]
    result = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert result.returncode in (0, NO_TESTS), result.stdout


def skip_tests_of_one_worker(items: Sequence[pytest.Item]) -> None:
    """Skip tests marked `one_worker`, with the reason of each mark."""
    for item in items:
        if (mark := item.get_closest_marker("one_worker")) is not None:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
