"""Additive kinds of metric series. Only the router's event loop updates them, many times per step, so they
use no locks and find buckets by bisection. Their numbers are cells in a storage that other processes may
read. prometheus_client renders them."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol
from zlib import crc32

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
    UntypedMetricFamily,
)
from prometheus_client.utils import floatToGoString

from tgis.router.metrics.storage import Cells, Labels, MemoryStorage, SeriesKey, Storage

QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
WINDOW_S = 60.0  # time window of the quantiles
MAX_OBSERVATIONS = 4096  # limit per process within the window; the oldest are dropped


class Series(Protocol):
    """Family of series in a scrape. Its name, kind, labels and help are in the documentation."""

    name: str
    help: str
    label_names: Labels
    kind: str

    def collect(self) -> Iterable[Metric]: ...


class _Followed(NamedTuple):
    cells: Cells
    begin: float
    """Count of the slot's earlier processes."""
    read: Callable[[], float]


class Counter:
    """Counter, exposed as `name` for TGIS's dashboards, unless it has only a total, and as `name_total` for
    Prometheus."""

    kind = "counter"

    def __init__(
        self,
        name: str,
        help: str,
        label_names: Labels = (),
        storage: Storage | None = None,
        has_bare_name: bool = True,
    ) -> None:
        self.name = name
        self.help = help
        self.label_names = label_names
        self.has_bare_name = has_bare_name
        self._storage = MemoryStorage() if storage is None else storage
        self._key = SeriesKey(name, self.kind, 1)
        self._cells: dict[Labels, Cells] = {}
        self._followed: dict[Labels, _Followed] = {}
        self.is_followed = False
        """True if some of the counts are read from elsewhere."""
        for labels in self._storage.labels(self._key) if label_names else ((),):
            self._start(labels)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Add to the series with these label values, in the order of declaration."""
        try:
            cells = self._cells[labels]
        except KeyError:
            cells = self._start(labels)
        cells[0] += amount

    def follow(self, read: Callable[[], float], *labels: str) -> None:
        """Read a count with `read`, which begins at 0, whenever the counts are published. Label values are in
        the order of declaration."""
        cells = self._cells.get(labels) or self._start(labels)
        begin = self._followed[labels].begin if labels in self._followed else cells[0]
        self._followed[labels] = _Followed(cells, begin, read)
        self.is_followed = True

    def publish(self) -> None:
        """Write the followed counts to their cells."""
        for cells, begin, read in self._followed.values():
            cells[0] = begin + read()

    def values(self) -> Mapping[Labels, float]:
        """Return all values by label values in the order of declaration."""
        self.publish()
        return {labels: cells[0] for labels, cells in self._cells.items()}

    def _start(self, labels: Labels) -> Cells:
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        cells = self._cells[labels] = self._storage.allocate(self._key, labels)
        return cells

    def collect(self) -> Iterable[Metric]:
        bare = UntypedMetricFamily(self.name, self.help, labels=self.label_names)
        total = CounterMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, value in self.values().items():
            bare.add_metric(labels, value)
            total.add_metric(labels, value)
        return [bare, total] if self.has_bare_name else [total]


class Histogram:
    """Histogram. `bounds` has the increasing upper bounds of the buckets; a bucket without a bound is added.
    Its cells are the counts by bucket, followed by the sum."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        help: str,
        bounds: Sequence[float],
        label_names: Labels = (),
        storage: Storage | None = None,
    ) -> None:
        self.name = name
        self.help = help
        self.label_names = label_names
        self._storage = MemoryStorage() if storage is None else storage
        self.bounds = self._cuts = tuple(bounds)
        self._cells: dict[Labels, Cells] = {}
        for labels in self._storage.labels(self._key) if label_names else ():
            self._start(labels)

    def divide(self, bounds: Sequence[float]) -> None:
        """Add upper bounds for a view with other buckets. This must precede all observations."""
        assert not self.label_names, "a view shows a single series"
        assert not self._cells, "there are earlier observations"
        self._cuts = tuple(sorted({*self._cuts, *bounds}))

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Count a value `times` times in the series with these label values, in the order of declaration."""
        try:
            cells = self._cells[labels]
        except KeyError:
            cells = self._start(labels)
        cells[bisect_left(self._cuts, value)] += times
        cells[-1] += times * value

    @property
    def count(self) -> int:
        """Number of observations in all series."""
        return int(sum(sum(cells[:-1]) for cells in self._all_cells().values()))

    def read(self, bounds: Sequence[float], labels: Labels = ()) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative buckets with these upper bounds, and the sum of a series."""
        *counts, total = self._all_cells()[labels]
        reached = list(accumulate(counts))
        buckets = [(_text(end), reached[bisect_left(self._cuts, end)]) for end in bounds]
        return [*buckets, (_text(float("inf")), reached[-1])], total

    @property
    def _key(self) -> SeriesKey:
        layout = f"{self.kind} {crc32(repr(self._cuts).encode()):08x}"
        return SeriesKey(self.name, layout, len(self._cuts) + 2)

    def _start(self, labels: Labels) -> Cells:
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        cells = self._cells[labels] = self._storage.allocate(self._key, labels)
        return cells

    def _all_cells(self) -> Mapping[Labels, Cells]:
        """Return the cells by labels. The cells of a series without labels are created here if it has no
        observations, because its buckets are known only now."""
        if not self.label_names and not self._cells:
            self._start(())
        return self._cells

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.help, labels=self.label_names)
        for labels in self._all_cells():
            family.add_metric(labels, *self.read(self.bounds, labels))
        return [family]


class Summary:
    """Summary: quantiles of the last minute, and the sum and count of all observations. The cells of a second
    record are a ring of the latest observations: times on the machine's monotonic clock, and values."""

    kind = "summary"

    def __init__(self, name: str, help: str, storage: Storage | None = None) -> None:
        self.name = name
        self.help = help
        self.label_names: Labels = ()
        self._storage = MemoryStorage() if storage is None else storage
        self._totals = self._storage.allocate(SeriesKey(name, self.kind, 2), ())
        self._recent: Cells | None = None
        self._recent_key = SeriesKey(name, "recent observations", 2 * MAX_OBSERVATIONS)
        self._next = 0

    def observe(self, value: float) -> None:
        recent = self._recent or self._start()
        totals = self._totals
        index = self._next
        recent[index + 1] = value
        recent[index] = time.monotonic()
        self._next = (index + 2) % len(recent)
        totals[1] += value
        totals[0] += 1.0

    def collect(self) -> Iterable[Metric]:
        count, total = self._totals
        family = SummaryMetricFamily(self.name, self.help, count_value=int(count), sum_value=total)
        values = sorted(self._observations())
        for quantile in QUANTILES:
            value = values[round(quantile * (len(values) - 1))] if values else 0.0
            family.add_sample(self.name, {"quantile": _text(quantile).removesuffix(".0")}, value)
        return [family]

    def _observations(self) -> Iterable[float]:
        """Yield the values of the last minute. Cells that were never written have the time 0."""
        now = time.monotonic()
        begin = now - WINDOW_S
        for cells in self._storage.parts(self._recent_key, ()):
            numbers = cells.tolist()
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            yield from (value for at, value in pairs if at and begin <= at <= now)

    def _start(self) -> Cells:
        """Return the ring, and continue after the latest observation of the slot's earlier processes."""
        recent = self._recent = self._storage.allocate(self._recent_key, ())
        times = recent.tolist()[::2]
        latest = max(range(len(times)), key=times.__getitem__)
        self._next = 2 * ((latest + 1) % len(times)) if times[latest] else 0
        return recent


def _text(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
