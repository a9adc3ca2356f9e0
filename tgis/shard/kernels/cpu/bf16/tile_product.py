"""Matrix products with bfloat16 arithmetic on AMX tiles. A sum adds 32 columns of x at a
time, so its bits do not depend on other rows, but differ from those of other processors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cpu.amx.inner_loop import PANEL
from tgis.shard.kernels.cpu.bf16 import tiles
from tgis.shard.kernels.cpu.bf16.tiles import TileProductKernels
from tgis.shard.kernels.cpu.gemm import product as gemm
from tgis.shard.kernels.cpu.gemm.launch import check_rows, choose_run
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty
from tgis.shard.kernels.cpu.pointwise.activations import GATED_KINDS

_UNIT = 16384  # numbers per unit of work when rounding
_MIN_PARALLEL = 1 << 18  # minimum multiplications for several threads


@dataclass(frozen=True, eq=False)
class TileProduct:
    """Product x W^T, float32 or rounded [num_tokens, in_features] -> float32 [num_tokens, out_features]."""

    panels: Tensor  # uint8, [panels, steps, rows of a tile, PANEL] pairs
    in_features: int
    out_features: int
    kernels: TileProductKernels

    @property
    def reads_rounded(self) -> bool:
        """True if x may be bfloat16, [num_tokens, in_features]: its rows are whole tiles."""
        return self.in_features % tiles.COLUMNS == 0

    @property
    def _types(self) -> Sequence[torch.dtype]:
        return (torch.float32, torch.bfloat16) if self.reads_rounded else (torch.float32,)

    @property
    def can_gate(self) -> bool:
        return self.out_features % (2 * PANEL) == 0

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self.in_features, self._types)
        y = empty(len(x), self.out_features)
        self._run(self.kernels.multiply, x, self.out_features, y)
        return y

    def multiply_gated(self, x: Tensor, name: str) -> Tensor:
        """Return activation(gate) * up rounded to bfloat16, [num_tokens, size], where the product is gate
        and up, [num_tokens, 2 * size]. `name` is that of a gated `Activation`."""
        assert self.can_gate, "gate and up are whole panels"
        check_rows(x, self.in_features, self._types)
        size = self.out_features // 2
        y = empty_rounded(len(x), size)
        self._run(self.kernels.multiply_gated, x, size, y, GATED_KINDS[name])
        return y

    def _run(self, kernel: Kernel, x: Tensor, size: int, y: Tensor, *options: int) -> None:
        num_rows = len(x)
        if not num_rows:
            return
        rounded = x if x.dtype == torch.bfloat16 else self._round(x)
        run = choose_run(kernel, num_rows * self.in_features * self.out_features, _MIN_PARALLEL)
        sizes = (num_rows, size, count_steps(self.in_features), torch.get_num_threads())
        run(*sizes, rounded.data_ptr(), self.panels.data_ptr(), y.data_ptr(), *options)

    def _round(self, x: Tensor) -> Tensor:
        """Return x rounded to pairs, padded with zeros to whole tiles."""
        num_rows = len(x)
        padded = count_steps(self.in_features) * tiles.COLUMNS
        rounded = empty_rounded(num_rows, padded)
        rows_per_unit = max(1, _UNIT // padded)
        run = tiles.round_pairs if num_rows <= rows_per_unit else tiles.round_pairs.parallel
        run(num_rows, self.in_features, padded, rows_per_unit, x.data_ptr(), rounded.data_ptr())
        return rounded


def empty_rounded(num_rows: int, size: int) -> Tensor:
    """Return uninitialised bfloat16 memory, [num_rows, size]. `size` is even, because kernel graphs have
    float32 memory only."""
    return empty(num_rows, size // 2).view(torch.bfloat16)


def pack(weight: Stored, kernels: TileProductKernels) -> TileProduct:
    """Pack a weight for kernels that multiply tiles."""
    out_features, in_features = weight.shape
    row_bytes = count_steps(in_features) * tiles.COLUMNS * torch.bfloat16.itemsize
    product = gemm.pack_elements(weight, _pair_up, row_bytes, kernels.multiply)
    return TileProduct(product.panels, in_features, out_features, kernels)


def count_steps(in_features: int) -> int:
    """Return the number of tiles per row of x."""
    return -(-in_features // tiles.COLUMNS)


def _pair_up(piece: Tensor) -> Tensor:
    """Round [num_rows, in_features] to pairs, int32 [num_rows, num_pairs], padded with zeros to whole
    tiles."""
    rounded = functional.pad(piece.to(torch.bfloat16), (0, -piece.shape[1] % tiles.COLUMNS))
    return rounded.view(torch.int32)
