"""Refuses requests that wait too long for their first step."""

import asyncio
import time
from collections.abc import Callable

from tgis.router.engine.live_request import LiveRequest
from tgis.router.events import TimedOut


class QueueTimeout:
    """Timers of the requests that have not started yet, one for each."""

    def __init__(self, limit_s: float | None, on_late: Callable[[LiveRequest, TimedOut], None]) -> None:
        """`on_late` must end the request. None means no limit."""
        self._limit_s = limit_s
        self._on_late = on_late

    def watch(self, live: LiveRequest) -> None:
        """Set the timer of an accepted request, unless it started in an earlier engine process."""
        if self._limit_s is not None and live.times.started_at is None:
            self._watch_until(live, live.times.accepted_at + self._limit_s, self._limit_s)

    def forget(self, live: LiveRequest) -> None:
        if live.queue_timer is not None:
            live.queue_timer.cancel()
            live.queue_timer = None

    def _watch_until(self, live: LiveRequest, due_at: float, limit_s: float) -> None:
        delay_s = max(due_at - time.monotonic(), 0.0)
        live.queue_timer = asyncio.get_running_loop().call_later(delay_s, self._check, live, limit_s)

    def _check(self, live: LiveRequest, limit_s: float) -> None:
        live.queue_timer = None
        if live.sequence.siblings.newest is not None:
            # The call has started: the sequence only waits for the blocks that its sibling computes.
            self._watch_until(live, time.monotonic() + limit_s, limit_s)
        else:
            self._on_late(live, TimedOut(limit_s, is_first=True, is_queued=True))
