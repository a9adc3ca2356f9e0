"""Base class of a process's metrics: creates series in one storage, and publishes, combines and renders
them."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest

from tgis.router.metrics.gauges import (
    Combine,
    Gauge,
    GaugeValues,
    LabelledGauge,
    read_gauges,
    show_combined,
)
from tgis.router.metrics.metric_types import Counter, Histogram, Series, Summary
from tgis.router.metrics.storage import MemoryStorage, Storage

DURATION_BOUNDS = tuple(0.0001 * 1.5**k for k in range(1, 36))  # seconds

S = TypeVar("S", bound=Series)


class SeriesRegistry:
    """Series in their own registry, so that two routers in one process do not conflict."""

    def __init__(self, storage: Storage | None) -> None:
        self.storage = MemoryStorage() if storage is None else storage
        self.registry = CollectorRegistry()
        self.series: list[Series] = []
        self._counters: list[Counter] = []
        self._gauges: list[Gauge | LabelledGauge] = []

    def publish(self) -> None:
        """Write followed counts to the shared storage. Unpublished counts are lost with this process."""
        if self.storage.is_shared:
            for counter in self._counters:
                if counter.is_followed:  # only a few are; each step publishes, so skip the others
                    counter.publish()

    def gauge_values(self) -> GaugeValues:
        """Return the values of the gauges that have a value in this process."""
        return read_gauges(self._gauges)

    def show_gauges(self, processes: Iterable[GaugeValues]) -> None:
        """Make the gauges show the combined values of all processes."""
        show_combined(self._gauges, processes)

    def close(self) -> None:
        """Publish the last counts and release the storage for another process."""
        self.publish()
        self.storage.close()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return self._add(Counter(name, help, labels, self.storage))

    def _total(self, name: str, help: str, *labels: str) -> Counter:
        """Add a counter that is exposed as `name_total` only, because TGIS had none like it."""
        return self._add(Counter(name, help, labels, self.storage, has_bare_name=False))

    def _gauge(self, name: str, help: str, combine: Combine = sum) -> Gauge:
        return self._add(Gauge(name, help, combine))

    def _histogram(self, name: str, help: str, bounds: Sequence[float], *labels: str) -> Histogram:
        return self._add(Histogram(name, help, bounds, labels, self.storage))

    def _duration(self, name: str, help: str, *labels: str) -> Histogram:
        return self._histogram(name, help, DURATION_BOUNDS, *labels)

    def _summary(self, name: str, help: str) -> Summary:
        return self._add(Summary(name, help, self.storage))

    def _add(self, series: S) -> S:
        self.registry.register(series)
        self.series.append(series)
        if isinstance(series, Counter):
            self._counters.append(series)
        elif isinstance(series, Gauge | LabelledGauge):
            self._gauges.append(series)
        return series
