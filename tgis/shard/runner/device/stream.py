"""Interface of a device's queue of work. Queued work accesses memory after the code that queued it has
continued, so the host must not change memory that queued work reads."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Point in a stream."""

    def wait(self) -> None:
        """Wait until all work queued before the event is done. Other Python threads can run."""


class StreamTimer(Protocol):
    """Measures how long a stream computes the work that is queued while the timer runs."""

    def stop(self) -> None: ...
    def read_ns(self) -> int:
        """Return the time from the start to the stop, which the device must have reached."""


class Graph(Protocol):
    """Captured work. A replay uses the addresses and scalar arguments of the capture."""

    def replay(self) -> None:
        """Queue the work again."""


class DeviceStream(Protocol):
    """Ordered queue of work on one device. Errors of queued work are raised by a later call."""

    @property
    def device(self) -> torch.device: ...

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work`. It is called either now, if its operators are queued themselves, or later. It must
        not depend on state that changes, and must not wait for the device."""

    def pinned(self, num_words: int) -> Tensor:
        """Return host memory, int32 [num_words], that queued copies can read and write."""

    def record(self) -> Event: ...
    def start_timer(self) -> StreamTimer: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, because the first run loads modules and allocates memory, then capture it. All
        graphs share memory: data that a graph allocates is valid until another graph is replayed. Raises
        RuntimeError if the work cannot be captured, because it waits for the device or reads values from its
        memory."""
