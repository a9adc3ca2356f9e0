"""Matrix products with bfloat16 arithmetic on AMX tiles. A sum adds 32 columns of x at a
time, so its bits do not depend on other rows, but differ from those of other processors."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cpu.bf16 import tiles
from tgis.shard.kernels.cpu.gemm import product as gemm
from tgis.shard.kernels.cpu.gemm.launch import check_rows, choose_run
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty

_UNIT = 16384  # numbers per unit of work when rounding
_MIN_PARALLEL = 1 << 18  # minimum multiplications for several threads


@dataclass(frozen=True, eq=False)
class TileProduct:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]."""

    panels: Tensor  # uint8, [panels, steps, rows of a tile, PANEL] pairs
    in_features: int
    out_features: int
    kernel: Kernel

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self.in_features)
        num_rows, steps = len(x), count_steps(self.in_features)
        y = empty(num_rows, self.out_features)
        padded = steps * tiles.COLUMNS
        rounded = empty(num_rows, padded // 2)
        rows_per_unit = max(1, _UNIT // padded)
        if num_rows:
            run = tiles.round_pairs if num_rows <= rows_per_unit else tiles.round_pairs.parallel
            run(num_rows, self.in_features, padded, rows_per_unit, x.data_ptr(), rounded.data_ptr())
            run = choose_run(self.kernel, num_rows * self.in_features * self.out_features, _MIN_PARALLEL)
            sizes = (num_rows, self.out_features, steps, torch.get_num_threads())
            run(*sizes, rounded.data_ptr(), self.panels.data_ptr(), y.data_ptr())
        return y


def pack(weight: Stored, kernel: Kernel) -> TileProduct:
    """Pack a weight for a kernel that multiplies tiles."""
    out_features, in_features = weight.shape
    row_bytes = count_steps(in_features) * tiles.COLUMNS * torch.bfloat16.itemsize
    product = gemm.pack_elements(weight, _pair_up, row_bytes, kernel)
    return TileProduct(product.panels, in_features, out_features, kernel)


def count_steps(in_features: int) -> int:
    """Return the number of tiles per row of x."""
    return -(-in_features // tiles.COLUMNS)


def _pair_up(piece: Tensor) -> Tensor:
    """Round [num_rows, in_features] to pairs, int32 [num_rows, num_pairs], padded with zeros to whole
    tiles."""
    rounded = functional.pad(piece.to(torch.bfloat16), (0, -piece.shape[1] % tiles.COLUMNS))
    return rounded.view(torch.int32)
