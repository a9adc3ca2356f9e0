"""Refuses requests that wait too long for their first step. A call is refused only as a whole, so its other
requests may wait longer once one has started."""

import asyncio
import time
from collections.abc import Callable

from tgis.router.engine.live_request import LiveRequest
from tgis.router.events import TimedOut


class QueueTimeout:
    """Timers of the requests that have not started yet, one for each."""

    def __init__(self, limit_s: float, on_late: Callable[[LiveRequest, TimedOut], None]) -> None:
        """`on_late` must end the request."""
        self._limit_s = limit_s
        self._on_late = on_late

    def watch(self, live: LiveRequest) -> None:
        """Set the timer of an accepted request, unless its call started, possibly in an earlier engine
        process."""
        if not live.call_start.is_done:
            delay_s = max(live.times.accepted_at + self._limit_s - time.monotonic(), 0.0)
            live.queue_timer = asyncio.get_running_loop().call_later(delay_s, self._check, live)

    def _check(self, live: LiveRequest) -> None:
        if not live.call_start.is_done:
            self._on_late(live, TimedOut(self._limit_s, is_first=True, is_queued=True))
