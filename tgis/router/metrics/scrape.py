"""Renders a scrape: the series of this process, or of all router processes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metric_file import read_records
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.storage import SummedStorage

GATHER_S = 1.0  # time limit for the gauges of other processes
PUBLISH_INTERVAL_S = 1.0

Render: TypeAlias = Callable[[], Awaitable[bytes]]
Gather: TypeAlias = Callable[[], Awaitable[list[GaugeValues]]]
"""Function that returns the gauges of all other router processes that answer."""


def render_process(metrics: Metrics) -> Render:
    """Return a function that renders the series of this process only."""

    async def render() -> bytes:
        return metrics.render()

    return render


def render_all(metrics: Metrics, directory: Path, gather: Gather) -> Render:
    """Return a function that renders the sums of all processes with a file in the directory. Gauges that do
    not arrive in time are omitted."""

    async def render() -> bytes:
        others = await gather_in_time(gather)
        metrics.publish()
        gauges = [metrics.gauge_values(), *others]
        return await asyncio.to_thread(render_sums, metrics, directory, gauges)

    return render


def render_sums(metrics: Metrics, directory: Path, gauges: list[GaugeValues]) -> bytes:
    return metrics.across(SummedStorage(read_records(directory)), gauges).render()


async def keep_published(metrics: Metrics) -> None:
    """Publish the counts periodically until cancelled, if the storage is shared with other processes."""
    while metrics.storage.is_shared:
        metrics.publish()
        await asyncio.sleep(PUBLISH_INTERVAL_S)


async def gather_in_time(gather: Gather) -> list[GaugeValues]:
    """Return the gauges of the other processes; none if they do not arrive within GATHER_S."""
    try:
        async with asyncio.timeout(GATHER_S):
            return await gather()
    except TimeoutError:
        return []
