"""Signs of life between a process that computes steps and its parent: one a second, until a step takes longer
than it may. Time is counted in beats, so that one in which the whole machine stood still is none."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_MISSED = 10  # beats in a row
_ALIVE, _HUNG = b".", b"!"
_READ_BYTES = 4096


@dataclass(frozen=True, eq=False)
class _Step:
    timeout_s: float


class Heartbeat:
    """The child's end."""

    def __init__(self, fd: int | None, is_excused: Callable[[], bool]) -> None:
        """Beats at once, on a thread of its own; `fd` None: nobody listens. Time does not count while
        `is_excused` says so."""
        self._step: _Step | None = None
        self._is_excused = is_excused
        if fd is not None:
            os.set_blocking(fd, False)
            threading.Thread(target=self._beat, args=(fd,), name="heartbeat", daemon=True).start()

    @contextmanager
    def step(self, timeout_s: float) -> Iterator[None]:
        """A step is being computed meanwhile; 0: it may take any time."""
        self._step = _Step(timeout_s) if timeout_s else None
        try:
            yield
        finally:
            self._step = None

    def _beat(self, fd: int) -> None:
        last, seconds = None, 0.0
        while True:
            step = self._step
            if step is None or step is not last:
                last, seconds = step, 0.0
            elif not self._is_excused():
                seconds += PERIOD_S
                if seconds > step.timeout_s:
                    break
            _tell(fd, _ALIVE)
            time.sleep(PERIOD_S)
        logger.error("a step takes longer than %.0f s", step.timeout_s)
        _tell(fd, _HUNG)


def _tell(fd: int, what: bytes) -> None:
    # A parent that stands still reads it later; one that is gone needs nothing.
    with contextlib.suppress(OSError):
        os.write(fd, what)


async def wait_until_hung(fd: int, has_begun: asyncio.Event) -> None:
    """The parent's end: returns when the child says that a step hangs, or has been silent for too long, which
    counts from its first sign of life on, when `has_begun` is set. Takes the descriptor over."""
    os.set_blocking(fd, False)
    loop, missed, signs = asyncio.get_running_loop(), 0, b""

    def begin() -> None:
        nonlocal signs
        loop.remove_reader(fd)
        signs = _read(fd)
        if signs:  # else it has ended
            has_begun.set()

    loop.add_reader(fd, begin)
    try:
        await has_begun.wait()
        while _HUNG not in signs and missed < MAX_MISSED:
            await asyncio.sleep(PERIOD_S)
            signs = _read(fd)
            missed = 0 if signs else missed + 1
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return b""
