"""The order of work on a device. Work that is queued reads and writes memory later than the code that queues
it, so whatever the host changes meanwhile must be memory that no queued work reads."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Point in a stream."""

    def wait(self) -> None:
        """Wait until all work queued before is done. Lets other Python threads run."""


class Graph(Protocol):
    """Captured work. Its addresses and numbers are those of the capture."""

    def replay(self) -> None:
        """Queue the work again."""


class DeviceStream(Protocol):
    """Queue of work on one device, in order. Errors of queued work are raised by a later call."""

    @property
    def device(self) -> torch.device: ...

    def run(self, work: Callable[[], None]) -> None:
        """Queue what `work` computes. It may be called now, where operators themselves are queued, or later:
        it must not be told anything that changes, and must not wait for the device."""

    def pinned(self, num_words: int) -> Tensor:
        """Return host memory, int32 [num_words], from and to which copies are queued."""

    def record(self) -> Event: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, because modules are loaded and memory is taken by the first run, and capture it.
        All graphs share their memory, so what a graph allocates is valid until another one is replayed.
        Raises RuntimeError if the work cannot be captured, because it waits for the device or looks at values
        in its memory."""
