"""Counts the losses of the launcher's children that chaos causes, and the connections that break with
them."""

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass

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


@dataclass
class _Window:
    """Time, of the monotonic clock, in which a number of connections may break."""

    begin: float
    end: float = math.inf
    num_left: int = 0


class Breaks:
    """Connections that may break because of a lost router worker, and when."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []

    def allow(self, count: int) -> None:
        """Allow this many more broken connections from now on."""
        if not self._windows or self._windows[-1].end < math.inf:
            self._windows.append(_Window(time.monotonic()))
        self._windows[-1].num_left += count

    def forbid(self) -> None:
        self._windows[-1].end = time.monotonic()

    def take(self, at: float) -> bool:
        """Return whether a connection may have broken at that time, and count it if so."""
        for window in self._windows:
            if window.begin <= at <= window.end and window.num_left:
                window.num_left -= 1
                return True
        return False
