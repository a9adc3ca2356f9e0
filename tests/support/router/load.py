"""Reads the load of an engine whose router is a single process."""

from functools import partial

from tgis.router.api.load_reports import LoadReports
from tgis.router.metrics.engine_load import EngineLoad, read_engine_load
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.request_rates import RequestRates

MAX_BATCH_SIZE = 8


async def no_other_processes() -> list[GaugeValues]:
    return []


def engine_load(num_running: int, num_waiting: int, cache_usage: float) -> EngineLoad:
    """Return a load whose other values are 0."""
    return EngineLoad(num_running, num_waiting, cache_usage, 0.0, 0.0, 0)


def load_reports(metrics: Metrics) -> LoadReports:
    read = partial(read_engine_load, metrics, no_other_processes)
    return LoadReports(read, RequestRates(metrics, None), MAX_BATCH_SIZE)
