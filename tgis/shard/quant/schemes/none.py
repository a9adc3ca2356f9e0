"""Scheme `none`: weights stay as they are in the checkpoint."""

from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import CountBytes, MatrixRole, Rounder
from tgis.shard.quant.schemes.portable_rounder import PORTABLE


class Unquantized:
    layout = table_layout = sensitive_layout = None

    def count_bytes_per_weight(self, sensitive_share: float, count: CountBytes) -> float:
        return 0.0  # no weights are quantized

    def encode(
        self,
        role: MatrixRole,
        stored: Stored,
        rounder: Rounder = PORTABLE,
        importance: Tensor | None = None,
    ) -> Stored:
        return stored


UNQUANTIZED = Unquantized()
