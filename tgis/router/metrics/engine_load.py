"""Reads how busy the engine is, from the gauges of all processes of the router."""

from typing import NamedTuple

from tgis.router.metrics.gauges import Gauge
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.scrape import Gather, gather_in_time


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
