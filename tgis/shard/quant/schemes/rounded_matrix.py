"""Views of a matrix that round weights when they are read. Groups are those of the whole matrix, so the
rounded weights do not depend on the number of ranks."""

from torch import Tensor

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import Rounder
from tgis.shard.quant.schemes.rounding import Rounding


class RoundedMatrix(CodeMatrix):
    """View of a matrix that rounds its weights, each group or row by itself."""

    def __init__(self, stored: Stored, layout: CodeLayout, rounding: Rounding):
        super().__init__(stored.shape, stored.label, layout)
        self._stored = stored
        self._round = rounding

    def take(self, rows: range, columns: range) -> Codes:
        if self._layout.group is not None:
            return self._round(self._stored.read(as_slice(rows), as_slice(columns)), self._layout)
        codes = self._round(self._stored.read(as_slice(rows)), self._layout)
        return Codes(self._layout, codes.values[:, as_slice(columns)].contiguous(), codes.scales)


class SearchedMatrix(CodeMatrix):
    """View of a matrix that rounds its weights with searched scales and offsets."""

    def __init__(self, stored: Stored, layout: CodeLayout, rounder: Rounder, importance: Tensor | None):
        super().__init__(stored.shape, stored.label, layout)
        self._stored = stored
        self._rounder = rounder
        self._importance = importance

    def take(self, rows: range, columns: range) -> Codes:
        part = as_slice(columns)
        importance = None if self._importance is None else self._importance[part]
        weights = self._stored.read(as_slice(rows), part)
        return self._rounder.round_with_offsets(weights, self._layout, importance)
