"""Reads the load of an engine whose router is a single process."""

from functools import partial

from tgis.router.api.load_reports import LoadReports
from tgis.router.metrics.engine_load import read_engine_load
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.request_rates import RequestRates

MAX_BATCH_SIZE = 8


async def no_other_processes() -> list[GaugeValues]:
    return []


def load_reports(metrics: Metrics) -> LoadReports:
    read = partial(read_engine_load, metrics, no_other_processes)
    return LoadReports(read, RequestRates(metrics, None), MAX_BATCH_SIZE)
