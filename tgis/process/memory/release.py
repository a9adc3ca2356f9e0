"""Returns memory to the system after large calls have ended.

An idle router collects garbage too rarely, and the C library keeps freed memory for later use."""

import asyncio
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

LARGE_BYTES = 32 << 10  # size of a large message; the memory of smaller ones is reused by the next calls
ENOUGH_BYTES = 1 << 20  # of large messages; their texts and token ids need many times as much memory
# Delays before the first release and before the second, which frees memory that cancelled calls still used.
DELAYS_S = (2.0, 4.0)

_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def return_freed_memory() -> None:
    """Return the C library's free memory to the system. This releases the GIL."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class MemoryRelease:
    """Counter of the bytes of large messages; releases memory when their calls end, even in a busy router."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._is_due = asyncio.Event()

    def count(self, num_bytes: int) -> None:
        """Count the bytes of an ended call's message."""
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
                gc.collect()  # scans only objects of requests, because those from start-up are frozen
                with suppress(RuntimeError):  # if the system has no thread left, a later release may have one
                    await asyncio.to_thread(return_freed_memory)
