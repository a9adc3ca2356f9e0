"""View of a matrix whose weights are rounded when they are read."""

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.schemes.rounding import Rounding


class RoundedMatrix(CodeMatrix):
    """View of a matrix whose weights are rounded. Groups are those of the whole matrix: of any number of
    ranks, each has its part of the same weights."""

    def __init__(self, stored: Stored, layout: CodeLayout, rounding: Rounding):
        super().__init__(stored.shape, stored.label, layout)
        self._stored = stored
        self._round = rounding

    def take(self, rows: range, columns: range) -> Codes:
        if self._layout.group is not None:
            return self._round(self._stored.read(as_slice(rows), as_slice(columns)), self._layout)
        codes = self._round(self._stored.read(as_slice(rows)), self._layout)
        return Codes(self._layout, codes.values[:, as_slice(columns)].contiguous(), codes.scales)
