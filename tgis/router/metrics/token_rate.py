"""Measures how many tokens per second are generated."""

from collections import deque
from typing import NamedTuple

WINDOW_S = 10.0
MARK_S = 1.0  # time between two marks, and the shortest time that a rate is taken over


class _Mark(NamedTuple):
    at: float
    total: int


class TokenRate:
    """Rate over the last ten seconds. Earlier idle time does not count."""

    def __init__(self) -> None:
        self._total = 0
        self._marks: deque[_Mark] = deque()

    def add(self, count: int, now: float) -> None:
        marks = self._marks
        if not marks or now >= marks[-1].at + MARK_S:
            if marks and now > marks[-1].at + WINDOW_S:
                marks.clear()
            marks.append(_Mark(now, self._total))
        self._total += count

    def read(self, now: float) -> float:
        """Return the tokens per second; 0 if none was generated in the window."""
        marks = self._marks
        if not marks or now > marks[-1].at + WINDOW_S:
            return 0.0
        while len(marks) > 1 and marks[1].at <= now - WINDOW_S:
            marks.popleft()
        return (self._total - marks[0].total) / max(now - marks[0].at, MARK_S)
