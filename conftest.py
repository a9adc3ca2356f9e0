"""Settings of all tests."""

import gc
import signal
from collections.abc import Generator

import pytest

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
