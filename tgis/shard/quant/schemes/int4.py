"""Scheme `int4`: 4 bits for linear layers; 8 bits for sensitive weights, the head and the embedding. Routers
of experts and activations are not quantized."""

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import CountBytes, MatrixRole, Rounder
from tgis.shard.quant.schemes.portable_rounder import PORTABLE
from tgis.shard.quant.schemes.rounded_matrix import RoundedMatrix, SearchedMatrix

GROUP = 64
LAYOUT = CodeLayout(torch.int8, 4, GROUP, has_offsets=True, scale_type="float16")
SENSITIVE_LAYOUT = CodeLayout(torch.int8, 8, GROUP)


class Int4:
    layout = LAYOUT
    table_layout = sensitive_layout = SENSITIVE_LAYOUT

    def count_bytes_per_weight(self, sensitive_share: float, count: CountBytes) -> float:
        others = (1 - sensitive_share) * count(LAYOUT)
        return others + sensitive_share * count(SENSITIVE_LAYOUT)

    def encode(
        self,
        role: MatrixRole,
        stored: Stored,
        rounder: Rounder = PORTABLE,
        importance: Tensor | None = None,
    ) -> Stored:
        if role == "linear":
            return SearchedMatrix(stored, LAYOUT, rounder, importance)
        if role == "replicated":
            return stored
        return RoundedMatrix(stored, SENSITIVE_LAYOUT, rounder.round_to_integers)
