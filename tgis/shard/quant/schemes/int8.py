"""Scheme `int8`: 8 bits for linear layers and the head. GROUP adjacent values of a row share a scale, their
largest magnitude divided by 127. Products also round activations to 8 bits."""

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL, Stored
from tgis.shard.quant.interface import CountBytes, MatrixRole, Rounder
from tgis.shard.quant.schemes.portable_rounder import PORTABLE

GROUP = 128
LAYOUT = CodeLayout(torch.int8, 8, GROUP, rounds_activations=True)


class Int8:
    layout = LAYOUT
    table_layout = sensitive_layout = None

    def count_bytes_per_weight(self, sensitive_share: float, count: CountBytes) -> float:
        return count(LAYOUT)

    def encode(
        self,
        role: MatrixRole,
        stored: Stored,
        rounder: Rounder = PORTABLE,
        importance: Tensor | None = None,
    ) -> Stored:
        return Rounded(stored, rounder) if role in ("linear", "sensitive", "head") else stored


class Rounded:
    """View of a matrix that rounds its weights. The groups of a part begin at the part's first column, so
    that each rank rounds its part by itself."""

    def __init__(self, stored: Stored, rounder: Rounder = PORTABLE):
        self._rounder = rounder
        self._stored = stored
        self.shape = stored.shape
        self.label = stored.label

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self.codes(rows, columns).dequantize()

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return LAYOUT

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        return self._rounder.round_to_integers(self._stored.read(rows, columns), LAYOUT)
