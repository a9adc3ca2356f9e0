"""Reads how busy the engine is, from the gauges of all processes of the router."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.scrape import Gather, gather_in_time

INTERVAL_S = 0.1  # time between two looks at the load


class EngineLoad(NamedTuple):
    num_running: int
    """Number of inputs in the batch."""
    num_waiting: int
    """Number of accepted inputs that are not in the batch."""
    cache_usage: float
    """Fraction of the cache's blocks in use."""


class RecentLoad:
    """Load of the engine, read at most once in INTERVAL_S for all calls."""

    def __init__(self, read: Callable[[], Awaitable[EngineLoad]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._load: EngineLoad | None = None
        self._read_at = 0.0

    async def read(self) -> EngineLoad:
        async with self._turn:
            if self._load is None or time.monotonic() >= self._read_at + INTERVAL_S:
                self._load = await self._read()
                self._read_at = time.monotonic()
            return self._load


async def read_engine_load(metrics: Metrics, gather: Gather) -> EngineLoad:
    """Return the load; zeros if the engine is in another process that does not answer in time. `gather`
    returns the gauges of the router's other processes."""
    processes = [metrics.gauge_values(), *await gather_in_time(gather)]
    gauges = metrics.requests_running, metrics.queue_size, metrics.kv_cache_usage
    num_running, num_waiting, cache_usage = (_total(processes, gauge.name) for gauge in gauges)
    return EngineLoad(int(num_running), int(num_waiting), cache_usage)


def _total(processes: Iterable[GaugeValues], name: str) -> float:
    """Return the sum of an unlabelled gauge, of which only the engine's process has a value."""
    return sum(value for each in processes for _, value in each.by_name.get(name, ()))
