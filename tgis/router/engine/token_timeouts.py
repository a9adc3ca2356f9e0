"""Fails requests whose first or next token does not arrive within its time limit."""

import asyncio
import time
from collections.abc import Callable, Iterable

from tgis.router.engine.live_request import LiveRequest
from tgis.router.events import TimedOut


class TokenTimeouts:
    """Timers of live requests, one for each. A timer moves only when it fires, so that tokens cost nothing.

    Time without shards does not count. After the shards return, the limit of the first token applies to a
    request's next token, because the shards compute its input again."""

    def __init__(
        self, first_s: float | None, next_s: float | None, on_late: Callable[[LiveRequest, TimedOut], None]
    ) -> None:
        """`on_late` must end the request. None means no limit."""
        self._first_s = first_s
        self._next_s = next_s
        self._on_late = on_late
        self._is_paused = False
        self._resumed_at = time.monotonic()  # earlier engine processes may have accepted requests

    def watch(self, live: LiveRequest) -> None:
        """Set the timer for a request's next token, after acceptance and again after the first token."""
        self.forget(live)
        is_first = live.awaits_first
        limit_s = self._first_s if is_first else self._next_s
        if limit_s is None or self._is_paused:
            return
        since = max(live.times.accepted_at, self._resumed_at) if is_first else live.times.last_token_at
        left_s = since + limit_s - time.monotonic()
        if left_s <= 0:
            self._on_late(live, TimedOut(limit_s, is_first))
        else:
            live.token_timer = asyncio.get_running_loop().call_later(left_s, self.watch, live)

    def forget(self, live: LiveRequest) -> None:
        if live.token_timer is not None:
            live.token_timer.cancel()
            live.token_timer = None

    def pause(self) -> None:
        self._is_paused = True

    def resume(self, requests: Iterable[LiveRequest]) -> None:
        """Set new timers for all live requests."""
        self._is_paused = False
        self._resumed_at = time.monotonic()
        for live in list(requests):
            live.awaits_first = True
            self.watch(live)
