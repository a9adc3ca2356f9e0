"""Gives memory back to the system after large calls have ended: an idle router makes too few objects for the
garbage collector to start by itself, and the C library keeps what is freed for later use."""

import asyncio
import ctypes
import gc
from collections.abc import Callable

LARGE_BYTES = 32 << 10  # of a message; smaller calls need no more memory than the next ones
ENOUGH_BYTES = 1 << 20  # of large messages, whose texts and token ids take many times as much
# From the first to a release, and from there to a second one, for what cancelled calls left running.
DELAYS_S = (2.0, 4.0)

_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def return_freed_memory() -> None:
    """Return to the system what the C library keeps, without holding the interpreter meanwhile."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class MemoryRelease:
    """Counts the bytes of large messages and releases memory soon after enough of their calls have ended,
    however busy the router is."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._is_due = asyncio.Event()

    def note(self, num_bytes: int) -> None:
        """Count a call that has ended, by the bytes of its message."""
        if num_bytes > LARGE_BYTES:
            self._num_bytes += num_bytes
            if self._num_bytes >= ENOUGH_BYTES:
                self._is_due.set()

    async def watch(self) -> None:
        """Release memory whenever it is due. Never returns."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            self._num_bytes = 0
            for delay in DELAYS_S:
                await asyncio.sleep(delay)
                gc.collect()  # of live requests only: what was there at the start is frozen
                await asyncio.to_thread(return_freed_memory)
