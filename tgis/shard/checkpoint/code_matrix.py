"""Base class of matrices that are stored as codes or rounded to codes. Any part can be read as floats."""

from abc import ABC, abstractmethod

from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL, WeightsError


class CodeMatrix(ABC):
    """Matrix [out_features, in_features] of one layout. Its groups, if any, are adjacent columns."""

    def __init__(self, shape: tuple[int, ...], label: str, layout: CodeLayout):
        self.shape = shape
        self.label = label
        self._layout = layout

    @abstractmethod
    def take(self, rows: range, columns: range) -> Codes:
        """Return the part as codes. `columns` must be whole groups."""

    def entry(self, index: int) -> "CodeMatrix":
        raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        requested = range(self.shape[1])[columns]
        whole = self._widen(requested)
        weights = self.take(range(self.shape[0])[rows], whole).dequantize()
        return weights[:, requested.start - whole.start :][:, : len(requested)].contiguous()

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        requested = range(self.shape[1])[columns]
        return self._layout if requested == self._widen(requested) else None

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        requested = range(self.shape[1])[columns]
        if requested != self._widen(requested):
            raise WeightsError(
                f"{self.label}: columns {requested.start} to {requested.stop} cannot be cut out of groups of "
                f"{self._layout.group}"
            )
        return self.take(range(self.shape[0])[rows], requested)

    def _widen(self, columns: range) -> range:
        """Return the columns of all groups that overlap `columns`."""
        group = self._layout.group
        if group is None or not columns:
            return columns
        stop = min(-(-columns.stop // group) * group, self.shape[1])
        return range(columns.start // group * group, stop)


def as_slice(part: range) -> slice:
    return slice(part.start, part.stop)
