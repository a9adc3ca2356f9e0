"""Schemes that round the weights of linear layers when they are read, and no activations. The head stays as
it is, as in the libraries whose names they have: nothing after it makes up for its errors. So do the routers
of experts, where an error chooses another expert, and the tables."""

from functools import partial

import torch

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.code_tables import TABLES
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.schemes.rounding import (
    Rounding,
    round_to_floats,
    round_to_integers,
    round_to_table,
)


class WeightOnly:
    def __init__(self, layout: CodeLayout, rounding: Rounding):
        self.layout, self._round = layout, rounding

    def encode(self, role: MatrixRole, stored: Stored) -> Stored:
        return RoundedMatrix(stored, self.layout, self._round) if role == "linear" else stored


class RoundedMatrix(CodeMatrix):
    """View of a matrix whose weights are rounded. Groups are those of the whole matrix: of any number of
    ranks, each has its part of the same weights."""

    def __init__(self, stored: Stored, layout: CodeLayout, rounding: Rounding):
        super().__init__(stored.shape, stored.label, layout)
        self._stored, self._round = stored, rounding

    def take(self, rows: range, columns: range) -> Codes:
        if self._layout.group is not None:
            return self._round(self._stored.read(as_slice(rows), as_slice(columns)), self._layout)
        codes = self._round(self._stored.read(as_slice(rows)), self._layout)
        return Codes(self._layout, codes.values[:, as_slice(columns)].contiguous(), codes.scales)


def _round_to_4_bits(kind: str) -> WeightOnly:
    return WeightOnly(CodeLayout(torch.uint8, 4, 64, table=TABLES[kind]), round_to_table)


_ROWS_OF_BYTES = WeightOnly(CodeLayout(torch.int8, 8, None), partial(round_to_integers, num_steps=127))

# 15 steps are between the least and the largest integer of 4 bits. The largest magnitude is half of them away
# from zero: one that is positive is rounded by half a step, as any other weight may be.
WEIGHT_ONLY = {
    "bitsandbytes": _ROWS_OF_BYTES,
    "eetq": _ROWS_OF_BYTES,
    "bitsandbytes-nf4": _round_to_4_bits("nf4"),
    "bitsandbytes-fp4": _round_to_4_bits("fp4"),
    "int4": WeightOnly(CodeLayout(torch.int8, 4, 128), partial(round_to_integers, num_steps=7.5)),
    "fp8": WeightOnly(CodeLayout(torch.float8_e4m3fn, 8, None), round_to_floats),
}
