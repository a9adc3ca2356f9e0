"""Kinds of metric series. Only the router's event loop updates them, many times per step, so they take no
locks and search their buckets by bisection. prometheus_client renders them."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
    UntypedMetricFamily,
)
from prometheus_client.utils import floatToGoString

QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
WINDOW_S = 60.0  # time that the quantiles cover
MAX_OBSERVATIONS = 4096  # limit within the window; the oldest are dropped

Labels = tuple[str, ...]


class Series(Protocol):
    """Family of series in a scrape. The documentation shows its name, kind, labels and help."""

    name: str
    help: str
    label_names: Labels
    kind: str

    def collect(self) -> Iterable[Metric]: ...


class Counter:
    """Counter, shown as `name`, which TGIS's dashboards query, and as `name_total`, as Prometheus expects."""

    kind = "counter"

    def __init__(self, name: str, help: str, label_names: Labels = ()) -> None:
        self.name, self.help, self.label_names = name, help, label_names
        self._values: dict[Labels, float] = {} if label_names else {(): 0.0}
        self._reads: dict[Labels, Callable[[], float]] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        """Add to the series with these label values, in the order of declaration."""
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def follow(self, read: Callable[[], float], *labels: str) -> None:
        """Read a count that is kept elsewhere at every scrape. Labels are in the order of declaration."""
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        self._reads[labels] = read

    def values(self) -> Mapping[Labels, float]:
        """Return all values by their labels, in the order of declaration."""
        self._values |= {labels: read() for labels, read in self._reads.items()}
        return self._values

    def collect(self) -> Iterable[Metric]:
        bare = UntypedMetricFamily(self.name, self.help, labels=self.label_names)
        total = CounterMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, value in self.values().items():
            bare.add_metric(labels, value)
            total.add_metric(labels, value)
        return [bare, total]


class Gauge:
    """State that is read at every scrape; 0 until `follow` is called."""

    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.label_names: Labels = ()
        self._read: Callable[[], float] = float

    def follow(self, read: Callable[[], float]) -> None:
        self._read = read

    def value(self) -> float:
        return self._read()

    def collect(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self.name, self.help, value=self.value())]


class LabelledGauge:
    """State that is read at every scrape, a number for each set of labels; none until `follow` is called."""

    kind = "gauge"

    def __init__(self, name: str, help: str, label_names: Labels) -> None:
        self.name, self.help, self.label_names = name, help, label_names
        self._read: Callable[[], Mapping[Labels, float]] = dict

    def follow(self, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Read the numbers by their labels, in the order of declaration."""
        self._read = read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, value in self._read().items():
            family.add_metric(labels, value)
        return [family]


@dataclass
class _Counts:
    by_bucket: list[int]
    total: float = 0.0


class Histogram:
    """Histogram. `bounds` are the buckets' upper ends, increasing; a bucket without an upper end is added."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], label_names: Labels = ()) -> None:
        self.name, self.help, self.label_names = name, help, label_names
        self.bounds = self._cuts = tuple(bounds)
        self._counts: dict[Labels, _Counts] = {}
        if not label_names:
            self._start(())

    def divide(self, bounds: Sequence[float]) -> None:
        """Count by further upper ends too, so that a view can show them. Call it before any observation."""
        assert not self.label_names, "a view shows a single series"
        assert not self.count, "earlier observations were not counted by them"
        self._cuts = tuple(sorted({*self._cuts, *bounds}))
        self._counts.clear()
        self._start(())

    def observe(self, value: float, *labels: str) -> None:
        """Count a value in the series with these label values, in the order of declaration."""
        counts = self._counts.get(labels) or self._start(labels)
        counts.by_bucket[bisect_left(self._cuts, value)] += 1
        counts.total += value

    @property
    def count(self) -> int:
        """Number of observations in all series."""
        return sum(sum(counts.by_bucket) for counts in self._counts.values())

    def read(self, bounds: Sequence[float], labels: Labels = ()) -> tuple[list[tuple[str, float]], float]:
        """Return buckets with these upper ends, each with the count up to there, and the sum of a series."""
        counts = self._counts[labels]
        reached = list(accumulate(counts.by_bucket))
        buckets = [(_text(end), float(reached[bisect_left(self._cuts, end)])) for end in bounds]
        return [*buckets, (_text(float("inf")), float(reached[-1]))], counts.total

    def _start(self, labels: Labels) -> _Counts:
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        return self._counts.setdefault(labels, _Counts([0] * (len(self._cuts) + 1)))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.help, labels=self.label_names)
        for labels in self._counts:
            family.add_metric(labels, *self.read(self.bounds, labels))
        return [family]


class Summary:
    """Quantiles of the last minute, and the sum and the count of everything."""

    kind = "summary"

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.label_names: Labels = ()
        self._recent: deque[tuple[float, float]] = deque(maxlen=MAX_OBSERVATIONS)
        self._count, self._total = 0, 0.0

    def observe(self, value: float) -> None:
        self._recent.append((time.monotonic(), value))
        self._count += 1
        self._total += value

    def collect(self) -> Iterable[Metric]:
        family = SummaryMetricFamily(self.name, self.help, count_value=self._count, sum_value=self._total)
        begin = time.monotonic() - WINDOW_S
        values = sorted(value for at, value in self._recent if at >= begin)
        for quantile in QUANTILES:
            value = values[round(quantile * (len(values) - 1))] if values else 0.0
            family.add_sample(self.name, {"quantile": _text(quantile).removesuffix(".0")}, value)
        return [family]


def _text(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
