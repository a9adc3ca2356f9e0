"""Kinds of metric series that show a state, and how the states of several processes become one."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tgis.router.metrics.storage import Labels

Combine: TypeAlias = Callable[[Iterable[float]], float]
"""Makes one value of those of the processes that know a gauge; there is at least one."""


class GaugeValues(NamedTuple):
    """Values of one process's gauges, plain enough to be sent to another. What the process does not know is
    absent."""

    by_name: dict[str, list[tuple[Labels, float]]]
    """Label values and value of each series of a gauge; a gauge without labels has one, with none."""


class Gauge:
    """State that is read at every scrape; 0 until `follow` is called."""

    kind = "gauge"

    def __init__(self, name: str, help: str, combine: Combine = sum) -> None:
        self.name, self.help, self.combine = name, help, combine
        self.label_names: Labels = ()
        self._read: Callable[[], float] | None = None

    def follow(self, read: Callable[[], float]) -> None:
        self._read = read

    def value(self) -> float:
        return 0.0 if self._read is None else self._read()

    def values(self) -> Mapping[Labels, float] | None:
        """Return the value as that of no labels; None if this process does not know it."""
        # Another process reads only a float, and a state may be a bool or an int.
        return None if self._read is None else {(): float(self._read())}

    def show(self, values: Mapping[Labels, float]) -> None:
        """Show the value from now on."""
        self.follow(lambda: values[()])

    def collect(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self.name, self.help, value=self.value())]


class LabelledGauge:
    """State that is read at every scrape, a number for each set of labels; none until `follow` is called."""

    kind = "gauge"

    def __init__(self, name: str, help: str, label_names: Labels, combine: Combine = sum) -> None:
        self.name, self.help, self.label_names, self.combine = name, help, label_names, combine
        self._read: Callable[[], Mapping[Labels, float]] | None = None

    def follow(self, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Read the numbers by their labels, in the order of declaration."""
        self._read = read

    def values(self) -> Mapping[Labels, float] | None:
        """Return the numbers by their labels; None if this process does not know them."""
        return None if self._read is None else self._read()

    def show(self, values: Mapping[Labels, float]) -> None:
        """Show the values from now on."""
        self.follow(lambda: values)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, value in (self.values() or {}).items():
            family.add_metric(labels, value)
        return [family]


def read_gauges(gauges: Iterable[Gauge | LabelledGauge]) -> GaugeValues:
    """Return the values that this process knows."""
    known = ((gauge.name, gauge.values()) for gauge in gauges)
    return GaugeValues({name: list(values.items()) for name, values in known if values is not None})


def show_combined(gauges: Iterable[Gauge | LabelledGauge], processes: Iterable[GaugeValues]) -> None:
    """Make the gauges show the values of all processes, as each gauge combines them."""
    everywhere = list(processes)
    for gauge in gauges:
        found: dict[Labels, list[float]] = {}
        knows = [values.by_name[gauge.name] for values in everywhere if gauge.name in values.by_name]
        for labels, value in (each for series in knows for each in series):
            found.setdefault(tuple(labels), []).append(value)
        if knows:
            gauge.show({labels: gauge.combine(values) for labels, values in found.items()})
