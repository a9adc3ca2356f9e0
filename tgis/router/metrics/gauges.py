"""Gauges, and how the values of several processes are combined."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from prometheus_client.core import GaugeMetricFamily, Metric

from tgis.router.metrics.storage import Labels

Combine: TypeAlias = Callable[[Iterable[float]], float]
"""Function that combines the values of all processes with a value for a gauge, at least one."""


class GaugeValues(NamedTuple):
    """Values of one process's gauges, in a form that can be sent to another process. Gauges without a value
    in this process are absent."""

    by_name: dict[str, list[tuple[Labels, float]]]
    """Label values and value of each series of a gauge. A gauge without labels has one series without label
    values."""


class Gauge:
    """Gauge that is read at every scrape; 0 until `follow` is called."""

    kind = "gauge"

    def __init__(self, name: str, help: str, combine: Combine = sum) -> None:
        self.name = name
        self.help = help
        self.combine = combine
        self.label_names: Labels = ()
        self._read: Callable[[], float] | None = None

    def follow(self, read: Callable[[], float]) -> None:
        self._read = read

    def value(self) -> float:
        return 0.0 if self._read is None else self._read()

    def values(self) -> Mapping[Labels, float] | None:
        """Return the value under empty labels; None if this process has no value."""
        # Messages between processes have floats, but a state may be a bool or an int.
        return None if self._read is None else {(): float(self._read())}

    def show(self, values: Mapping[Labels, float]) -> None:
        """Show a fixed value from now on."""
        self.follow(lambda: values[()])

    def collect(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self.name, self.help, value=self.value())]


class LabelledGauge:
    """Gauge with labels that is read at every scrape; empty until `follow` is called."""

    kind = "gauge"

    def __init__(self, name: str, help: str, label_names: Labels, combine: Combine = sum) -> None:
        self.name = name
        self.help = help
        self.label_names = label_names
        self.combine = combine
        self._read: Callable[[], Mapping[Labels, float]] | None = None

    def follow(self, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Read the values with `read`, which returns them by label values in the order of declaration."""
        self._read = read

    def values(self) -> Mapping[Labels, float] | None:
        """Return the values by label values; None if this process has none."""
        return None if self._read is None else self._read()

    def show(self, values: Mapping[Labels, float]) -> None:
        """Show fixed values from now on."""
        self.follow(lambda: values)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, value in (self.values() or {}).items():
            family.add_metric(labels, value)
        return [family]


def read_gauges(gauges: Iterable[Gauge | LabelledGauge]) -> GaugeValues:
    """Return the values of the gauges that have a value in this process."""
    by_name = ((gauge.name, gauge.values()) for gauge in gauges)
    return GaugeValues({name: list(values.items()) for name, values in by_name if values is not None})


def show_combined(gauges: Iterable[Gauge | LabelledGauge], processes: Iterable[GaugeValues]) -> None:
    """Make the gauges show the combined values of all processes."""
    all_values = list(processes)
    for gauge in gauges:
        by_labels: dict[Labels, list[float]] = {}
        present = [values.by_name[gauge.name] for values in all_values if gauge.name in values.by_name]
        for labels, value in (each for series in present for each in series):
            by_labels.setdefault(tuple(labels), []).append(value)
        if present:
            gauge.show({labels: gauge.combine(values) for labels, values in by_labels.items()})
