"""Clock for tests of short time limits in one event loop, which a busy machine must not end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

TICK_S = 0.01
MAX_STEP_S = 0.03


class SteadyClock:
    """Monotonic clock that advances by at most `MAX_STEP_S` from one reading to the next."""

    def __init__(self) -> None:
        self._monotonic = time.monotonic
        self._lock = threading.Lock()
        self._read_at = self._now = self._monotonic()

    def __call__(self) -> float:
        with self._lock:
            read_at = self._monotonic()
            self._now += min(read_at - self._read_at, MAX_STEP_S)
            self._read_at = read_at
            return self._now


@asynccontextmanager
async def run_steady_clock() -> AsyncIterator[None]:
    """Replace `time.monotonic`, which asyncio's own event loop uses too, with a clock that does not count
    time during which the process or the event loop stood still."""
    loop = asyncio.get_running_loop()
    clock = SteadyClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)

        def tick() -> None:
            nonlocal handle
            clock()
            handle = loop.call_later(TICK_S, tick)

        handle = loop.call_later(TICK_S, tick)
        try:
            yield
        finally:
            handle.cancel()
