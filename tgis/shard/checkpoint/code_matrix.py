"""Base of matrices that are stored as codes or rounded to codes: any part of them can be read as floats."""

from abc import ABC, abstractmethod

from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL, WeightsError


class CodeMatrix(ABC):
    """Matrix [out_features, in_features] of one layout whose groups, if any, are adjacent columns."""

    def __init__(self, shape: tuple[int, ...], label: str, layout: CodeLayout):
        self.shape, self.label, self._layout = shape, label, layout

    @abstractmethod
    def take(self, rows: range, columns: range) -> Codes:
        """Return the part as codes; `columns` are whole groups."""

    def entry(self, index: int) -> "CodeMatrix":
        raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        asked = range(self.shape[1])[columns]
        whole = self._widen(asked)
        weights = self.take(range(self.shape[0])[rows], whole).dequantize()
        return weights[:, asked.start - whole.start :][:, : len(asked)].contiguous()

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        asked = range(self.shape[1])[columns]
        return self._layout if asked == self._widen(asked) else None

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        asked = range(self.shape[1])[columns]
        if asked != self._widen(asked):
            raise WeightsError(
                f"{self.label}: columns {asked.start} to {asked.stop} cannot be cut out of groups of "
                f"{self._layout.group}"
            )
        return self.take(range(self.shape[0])[rows], asked)

    def _widen(self, columns: range) -> range:
        """Return the columns of all groups that have some of `columns`."""
        group = self._layout.group
        if group is None or not columns:
            return columns
        stop = min(-(-columns.stop // group) * group, self.shape[1])
        return range(columns.start // group * group, stop)


def as_slice(part: range) -> slice:
    return slice(part.start, part.stop)
