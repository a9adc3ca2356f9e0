"""Schemes that quantize the weights of linear layers, but not activations. The head is not quantized, as in
the libraries after which the schemes are named, because no later layer corrects its errors. Neither are
embeddings and routers of experts, where an error selects another expert."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.code_tables import TABLES
from tgis.shard.quant.interface import CountBytes, MatrixRole, Rounder, Scheme
from tgis.shard.quant.schemes.int4 import Int4
from tgis.shard.quant.schemes.portable_rounder import PORTABLE
from tgis.shard.quant.schemes.rounded_matrix import RoundedMatrix
from tgis.shard.quant.schemes.rounding import (
    Rounding,
    round_to_floats,
    round_to_table,
)


class WeightOnly:
    """Scheme of one layout. `choose_rounding` returns the function that rounds weights."""

    def __init__(self, layout: CodeLayout, choose_rounding: Callable[[Rounder], Rounding]):
        self.layout = layout
        self._choose_rounding = choose_rounding
        self.table_layout = self.sensitive_layout = None

    def count_bytes_per_weight(self, sensitive_share: float, count: CountBytes) -> float:
        return count(self.layout)

    def encode(
        self,
        role: MatrixRole,
        stored: Stored,
        rounder: Rounder = PORTABLE,
        importance: Tensor | None = None,
    ) -> Stored:
        if role not in ("linear", "sensitive"):
            return stored
        return RoundedMatrix(stored, self.layout, self._choose_rounding(rounder))


def _round_to_4_bits(kind: str) -> WeightOnly:
    return WeightOnly(CodeLayout(torch.uint8, 4, 64, table=TABLES[kind]), lambda _: round_to_table)


_ROWS_OF_BYTES = WeightOnly(CodeLayout(torch.int8, 8, None), lambda rounder: rounder.round_to_integers)

WEIGHT_ONLY: dict[str, Scheme] = {
    "bitsandbytes": _ROWS_OF_BYTES,
    "eetq": _ROWS_OF_BYTES,
    "bitsandbytes-nf4": _round_to_4_bits("nf4"),
    "bitsandbytes-fp4": _round_to_4_bits("fp4"),
    "int4": Int4(),
    "fp8": WeightOnly(CodeLayout(torch.float8_e4m3fn, 8, None), lambda _: round_to_floats),
}
