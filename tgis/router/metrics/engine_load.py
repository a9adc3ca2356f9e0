"""Reads how busy the engine is, from the gauges of all processes of the router."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tgis.router.metrics.gauges import Gauge
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
    throughput: float
    """Tokens generated per second."""
    hit_rate: float
    """Fraction of looked-up tokens that the prefix cache had."""
    num_uncached_tokens: int
    """Estimated number of tokens of waiting inputs that are not cached."""


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

    def total(gauge: Gauge) -> float:
        """Return the sum of a gauge, of which only the engine's process has a value."""
        return sum(value for each in processes for _, value in each.by_name.get(gauge.name, ()))

    return EngineLoad(
        int(total(metrics.requests_running)),
        int(total(metrics.queue_size)),
        total(metrics.kv_cache_usage),
        total(metrics.generation_throughput),
        total(metrics.prefix_cache_hit_rate),
        round(total(metrics.queue_uncached_tokens)),
    )
