"""Settings of all tests."""

import gc
import itertools
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
COMPUTING = ROOT / "tests" / "shard"
LONG = ROOT / "integration_tests"
LENGTH = 4  # of a file of LONG, in other files

# Imports and the collection create two million objects. Garbage collections would examine them again and
# again, which takes longer than the collection of the tests.
gc.disable()


def pytest_configure() -> None:
    # A run in the background of a shell ignores SIGINT, and the processes that tests start would too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the collected tests and imported modules from garbage collection. With two million objects, each
    `gc.collect()` of the code under test would take more than a second."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In parallel processes, mix the tests of shards, which compute, with all others, which mostly wait for
    services and clients. While only the others run, they often leave one of two cores idle."""
    if not hasattr(config, "workerinput"):
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    computing = [path for path in files if path.is_relative_to(COMPUTING)]
    others = [path for path in files if not path.is_relative_to(COMPUTING)]
    places = find_places(computing) | find_places(others)
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


def find_places(files: list[Path]) -> dict[Path, float]:
    """Return the share of the files' time that is over before each of them."""
    lengths = [LENGTH if path.is_relative_to(LONG) else 1 for path in files]
    ends = itertools.accumulate(lengths)
    return {
        path: (end - length) / sum(lengths) for path, end, length in zip(files, ends, lengths, strict=True)
    }
