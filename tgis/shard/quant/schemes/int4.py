"""Scheme `int4`: 4 bits for linear layers; 8 bits for sensitive weights, the head and the embedding. Routers
of experts and activations are not quantized."""

from functools import partial

import torch

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.schemes.rounded_matrix import RoundedMatrix
from tgis.shard.quant.schemes.rounding import round_to_integers
from tgis.shard.quant.schemes.search import round_with_offsets

GROUP = 64
LAYOUT = CodeLayout(torch.int8, 4, GROUP, has_offsets=True, scale_type="float16")
SENSITIVE_LAYOUT = CodeLayout(torch.int8, 8, GROUP)
_round_sensitive = partial(round_to_integers, num_steps=127)


class Int4:
    layout, table_layout = LAYOUT, SENSITIVE_LAYOUT

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight if a fifth of the weights is sensitive, as in models with dozens of layers."""
        return 0.8 * LAYOUT.bytes_per_weight + 0.2 * SENSITIVE_LAYOUT.bytes_per_weight

    def encode(self, role: MatrixRole, stored: Stored) -> Stored:
        if role == "linear":
            return RoundedMatrix(stored, LAYOUT, round_with_offsets)
        if role == "replicated":
            return stored
        return RoundedMatrix(stored, SENSITIVE_LAYOUT, _round_sensitive)
