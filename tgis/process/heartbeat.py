"""Sends heartbeats from a process to its parent once a second, until a step takes too long or the event loop
hangs.

Time is counted in heartbeats, so time during which the whole machine was suspended does not count."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_MISSED = 10  # heartbeats in a row
_HEARTBEAT, _SERVING, _HUNG = b".", b"+", b"!"
_READ_BYTES = 4096


@dataclass(frozen=True, eq=False)
class _Step:
    timeout_s: float


class Heartbeat:
    def __init__(self, fd: int | None, is_excused: Callable[[], bool]) -> None:
        """Start to send heartbeats to `fd`, if given. Time during which `is_excused()` is true does not
        count."""
        self._pending: deque[_Step] = deque()
        self._is_excused = is_excused
        if fd is not None:
            os.set_blocking(fd, False)
            threading.Thread(target=self._send_heartbeats, args=(fd,), name="heartbeat", daemon=True).start()

    def begin_step(self, timeout_s: float) -> None:
        """Limit the time of a step, from now or from the end of the previous step; 0: no limit."""
        self._pending.append(_Step(timeout_s))

    def end_step(self) -> None:
        """End the oldest step. Steps may begin in another thread."""
        self._pending.popleft()

    def _find_oldest(self) -> _Step | None:
        try:
            return self._pending[0]
        except IndexError:
            return None

    def _send_heartbeats(self, fd: int) -> None:
        last = None
        seconds = 0.0
        while True:
            step = self._find_oldest()
            if step is None or step is not last or not step.timeout_s:
                last = step
                seconds = 0.0
            elif not self._is_excused():
                seconds += PERIOD_S
                if seconds > step.timeout_s:
                    break
            _send(fd, _HEARTBEAT)
            time.sleep(PERIOD_S)
        logger.error("a step has taken longer than %.0f s", step.timeout_s)
        _send(fd, _HUNG)


def _send(fd: int, sign: bytes) -> None:
    # The pipe is full if the parent was suspended for hours. It then has enough heartbeats to read, and if it
    # misses the report of a hung step, it notices the silence that follows. A dead parent closes the pipe.
    with contextlib.suppress(OSError):
        os.write(fd, sign)


async def send_heartbeats(fd: int | None, is_serving: Callable[[], bool]) -> None:
    """Send heartbeats to `fd`, if given, while the event loop runs.

    A heartbeat also reports whether the process has started to serve."""
    if fd is None:
        return
    os.set_blocking(fd, False)
    while True:
        _send(fd, _SERVING if is_serving() else _HEARTBEAT)
        await asyncio.sleep(PERIOD_S)


async def wait_until_hung(fd: int, first_heartbeat: asyncio.Event, serving: asyncio.Event) -> None:
    """Wait until the child reports a hung step or has sent no heartbeat for too long; then close `fd`.

    This runs in the parent. Silence counts from the first heartbeat, which sets `first_heartbeat`. The first
    heartbeat of a serving child sets `serving`."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    missed = 0
    signs = b""

    def on_readable() -> None:
        nonlocal signs
        loop.remove_reader(fd)
        signs = _read(fd)
        if signs:  # otherwise the child has ended
            first_heartbeat.set()

    loop.add_reader(fd, on_readable)
    try:
        await first_heartbeat.wait()
        while _HUNG not in signs and missed < MAX_MISSED:
            if _SERVING in signs:
                serving.set()
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
