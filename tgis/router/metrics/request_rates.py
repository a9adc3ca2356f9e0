"""Measures how many requests end and fail per second, in all processes of the router."""

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from tgis.router.metrics.metric_file import read_records
from tgis.router.metrics.metric_types import Counter
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.storage import SummedStorage

INTERVAL_S = 1.0  # time between two readings of the counts
WINDOW_S = 10.0
SERVICE_ERRORS = {"conc_limit", "generate", "queue_timeout", "token_timeout"}
ALSO_SUCCESSES = "timeout"


class Counts(NamedTuple):
    num_ended: float
    num_errors: float


class Rates(NamedTuple):
    ended: float
    """Inputs per second that ended in any way."""
    errors: float
    """Requests per second that the service refused or failed for its own reasons."""


class RequestRates:
    """Rates of the last WINDOW_S seconds. They are 0 until the counts have been read twice."""

    def __init__(self, metrics: Metrics, directory: str | None) -> None:
        """Take the process's metrics, and the directory of all processes' metric files if there is one."""
        self._counters = metrics.request_success, metrics.request_failure
        self._directory = None if directory is None else Path(directory)
        self._turn = asyncio.Lock()
        self._readings: deque[tuple[float, Counts]] = deque()

    async def read(self) -> Rates:
        async with self._turn:
            if not self._readings or time.monotonic() >= self._readings[-1][0] + INTERVAL_S:
                counts = await self._count()
                self._add(time.monotonic(), counts)
        begin, first = self._readings[0]
        end, last = self._readings[-1]
        if begin == end:
            return Rates(0.0, 0.0)
        ended, errors = (max(b - a, 0.0) / (end - begin) for a, b in zip(first, last, strict=True))
        return Rates(ended, errors)

    def _add(self, now: float, counts: Counts) -> None:
        """Keep the readings within the window, and the last one before it."""
        self._readings.append((now, counts))
        while len(self._readings) > 2 and self._readings[1][0] <= now - WINDOW_S:
            self._readings.popleft()

    async def _count(self) -> Counts:
        if self._directory is None:
            return _count(*self._counters)
        return await asyncio.to_thread(self._count_files, self._directory)

    def _count_files(self, directory: Path) -> Counts:
        storage = SummedStorage(read_records(directory))
        success, failure = (
            Counter(each.name, each.help, each.label_names, storage) for each in self._counters
        )
        return _count(success, failure)


def _count(success: Counter, failure: Counter) -> Counts:
    num_successes = sum(success.values().values())
    failures = {error: count for (error,), count in failure.values().items() if error != ALSO_SUCCESSES}
    num_errors = sum(count for error, count in failures.items() if error in SERVICE_ERRORS)
    return Counts(num_successes + sum(failures.values()), num_errors)
