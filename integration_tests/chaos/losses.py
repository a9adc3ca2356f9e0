"""Counts the losses of the launcher's children that chaos causes, and the connections that break with
them."""

import threading
import time
from collections import defaultdict, deque

# The launcher gives up after six restarts of the shards, or of a router process, in five minutes.
WINDOW_S, MAX_RESTARTS = 310.0, 4


class Losses:
    """Times at which children were lost, by the child's name."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    def note(self, name: str, count: int = 1) -> None:
        self._times[name].extend([time.monotonic()] * count)

    def may_happen(self, name: str) -> bool:
        """Return whether a child may be lost again without the launcher giving up."""
        recent, now = self._times[name], time.monotonic()
        while recent and now - recent[0] > WINDOW_S:
            recent.popleft()
        return len(recent) < MAX_RESTARTS


class Breaks:
    """Number of connections that may still break because of a lost router worker."""

    def __init__(self) -> None:
        self._lock, self._num_left = threading.Lock(), 0

    def allow(self, count: int) -> None:
        """Allow this many more broken connections."""
        with self._lock:
            self._num_left += count

    def forbid(self) -> None:
        with self._lock:
            self._num_left = 0

    def take(self) -> bool:
        """Return whether a connection may have broken, and count it if so."""
        with self._lock:
            is_allowed = self._num_left > 0
            self._num_left -= is_allowed
            return is_allowed
