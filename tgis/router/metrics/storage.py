"""Storage of metric series: the memory of one process, or files that all router processes read
(`metric_file`)."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

Labels: TypeAlias = tuple[str, ...]
Cells: TypeAlias = "memoryview[float]"
"""Array of doubles. A memoryview is the fastest Python array for updates in place."""


class SeriesKey(NamedTuple):
    """Identity of a family's records. Only records with equal keys may be summed."""

    name: str
    layout: str
    """Meaning of the cells, such as the kind and the buckets."""
    num_cells: int


Records: TypeAlias = Mapping[SeriesKey, Mapping[Labels, Cells]]


class Storage(Protocol):
    is_shared: bool
    """True if other processes read the cells."""
    is_reopened: bool
    """True if an earlier process used the storage."""

    def allocate(self, key: SeriesKey, labels: Labels) -> Cells:
        """Return the cells of a series. They begin at 0, or with the values of an earlier process."""

    def labels(self, key: SeriesKey) -> Sequence[Labels]:
        """Return the label values of a family's series that have cells."""

    def parts(self, key: SeriesKey, labels: Labels) -> Sequence[Cells]:
        """Return the cells of a series, from each process that has some."""

    def close(self) -> None:
        """Release files. Cells remain usable."""


class MemoryStorage:
    """`Storage` in the memory of one process."""

    is_shared = is_reopened = False

    def __init__(self) -> None:
        self._records: dict[SeriesKey, dict[Labels, Cells]] = {}

    def allocate(self, key: SeriesKey, labels: Labels) -> Cells:
        by_labels = self._records.setdefault(key, {})
        if labels not in by_labels:
            by_labels[labels] = self._make_cells(key, labels)
        return by_labels[labels]

    def labels(self, key: SeriesKey) -> Sequence[Labels]:
        return list(self._records.get(key, ()))

    def parts(self, key: SeriesKey, labels: Labels) -> Sequence[Cells]:
        cells = self._records.get(key, {}).get(labels)
        return () if cells is None else (cells,)

    def close(self) -> None:
        pass

    def _make_cells(self, key: SeriesKey, labels: Labels) -> Cells:
        return empty_cells(key.num_cells)


class SummedStorage:
    """`Storage` with the sums of several processes' records. Updates are not written back."""

    is_shared = is_reopened = False

    def __init__(self, processes: Iterable[Records]) -> None:
        self._parts: dict[SeriesKey, dict[Labels, list[Cells]]] = {}
        for records in processes:
            for key, by_labels in records.items():
                for labels, cells in by_labels.items():
                    self._parts.setdefault(key, {}).setdefault(labels, []).append(cells)

    def allocate(self, key: SeriesKey, labels: Labels) -> Cells:
        parts = self.parts(key, labels)
        if not parts:
            return empty_cells(key.num_cells)
        return memoryview(array("d", map(sum, zip(*parts, strict=True))))

    def labels(self, key: SeriesKey) -> Sequence[Labels]:
        return list(self._parts.get(key, ()))

    def parts(self, key: SeriesKey, labels: Labels) -> Sequence[Cells]:
        return self._parts.get(key, {}).get(labels, ())

    def close(self) -> None:
        pass


def empty_cells(num_cells: int) -> Cells:
    return memoryview(array("d", bytes(8 * num_cells)))
