"""Matrices of a layer's experts, and the table of their addresses on the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.layers.ops import Activation

# Rows of a tile: few while weights are read for a few rows each, many for prompts.
FEW_ROWS, MANY_ROWS = 16, 64


@dataclass(frozen=True)
class ExpertMatrices:
    """Two linear layers of one expert."""

    up: Tensor  # [1 or 2 * size, width]; if gated, the gate's rows come first
    up_bias: Tensor | None  # float32
    down: Tensor  # [width, size]
    down_bias: Tensor | None  # float32

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.up, self.up_bias, self.down, self.down_bias


@dataclass(frozen=True)
class ExpertTable:
    """Experts of a layer: y = down(activation(up(x))). All have the same type, and either all have biases in
    a matrix or none has. A gate is multiplied by `gate_scale` before its activation."""

    experts: Sequence[ExpertMatrices]
    activation: Activation
    gate_scale: float
    scales_input: bool  # the weight of an expert multiplies its input instead of its output
    addresses: Tensor  # of the matrices and biases, int64 [num_experts, 4]

    @classmethod
    def of(
        cls, experts: Sequence[ExpertMatrices], activation: Activation, gate_scale: float, scales_input: bool
    ) -> "ExpertTable":
        rows = [[0 if x is None else x.data_ptr() for x in each.tensors] for each in experts]
        addresses = torch.tensor(rows, dtype=torch.int64).to(experts[0].up.device)
        return cls(experts, activation, gate_scale, scales_input, addresses)

    @property
    def dtype(self) -> torch.dtype:
        return self.experts[0].up.dtype

    @property
    def size(self) -> int:
        return self.experts[0].down.shape[1]

    def choose_tile(self, num_rows: int) -> int:
        """Return the rows of a tile if the chosen experts have so many rows in total."""
        return MANY_ROWS if num_rows > len(self.experts) * MANY_ROWS // 2 else FEW_ROWS
