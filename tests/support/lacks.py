"""A process that has as many open files or threads as it may have."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let every attempt to open a file in this context fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest free one
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Let every start of a thread in this context fail."""

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    threading.Thread.start = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
