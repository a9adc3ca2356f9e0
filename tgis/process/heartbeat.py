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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_MISSED = 10  # heartbeats in a row
# An import or a read from a slow disk may hold the interpreter for long.
MAX_MISSED_LOADING = 120
_LOADING, _HEARTBEAT, _SERVING, _HUNG = b"-", b".", b"+", b"!"
_READ_BYTES = 4096


@dataclass(frozen=True, eq=False)
class _Step:
    timeout_s: float


class Heartbeat:
    """Heartbeats of a process that loads a model and then computes steps."""

    def __init__(self, fd: int | None) -> None:
        """Start to send heartbeats to `fd`, if given."""
        self._fd = fd
        self._pending: deque[_Step] = deque()
        self._sign = _LOADING
        self._is_excused: Callable[[], bool] = lambda: False
        if fd is not None:
            os.set_blocking(fd, False)
            threading.Thread(target=self._send_heartbeats, args=(fd,), name="heartbeat", daemon=True).start()

    def finish_loading(self, is_excused: Callable[[], bool]) -> None:
        """Report that the model is loaded. From now on, time during which `is_excused()` is true does not
        count as time of a step."""
        self._is_excused = is_excused
        self._sign = _HEARTBEAT
        if self._fd is not None:
            _send(self._fd, _HEARTBEAT)

    def begin_step(self, timeout_s: float) -> None:
        """Limit the time of a step, from now or from the end of the previous step; 0: no limit."""
        self._pending.append(_Step(timeout_s))

    def end_step(self) -> None:
        """End the oldest step. Steps may begin in another thread."""
        self._pending.popleft()

    @contextlib.contextmanager
    def limit_time(self, timeout_s: float) -> Iterator[None]:
        """Limit the time of the context like that of a step."""
        self.begin_step(timeout_s)
        try:
            yield
        finally:
            self.end_step()

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
            _send(fd, self._sign)
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


async def wait_until_hung(fd: int, loaded: asyncio.Event, serving: asyncio.Event) -> None:
    """Wait until the child reports a hung step or has sent no heartbeat for too long; then close `fd`.

    This runs in the parent. The first heartbeat of a child that has loaded sets `loaded`, and shortens the
    allowed silence. The first heartbeat of a serving child sets `serving`."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    num_missed = 0
    is_hung = False

    def on_readable() -> None:
        nonlocal num_missed, is_hung
        signs = os.read(fd, _READ_BYTES)
        if not signs:  # the child has ended
            loop.remove_reader(fd)
            return
        num_missed = 0
        is_hung = _HUNG in signs
        if signs.strip(_LOADING):
            loaded.set()
        if _SERVING in signs:
            serving.set()

    loop.add_reader(fd, on_readable)
    try:
        while not is_hung and num_missed < (MAX_MISSED if loaded.is_set() else MAX_MISSED_LOADING):
            await asyncio.sleep(PERIOD_S)
            num_missed += 1
    finally:
        loop.remove_reader(fd)
        os.close(fd)
