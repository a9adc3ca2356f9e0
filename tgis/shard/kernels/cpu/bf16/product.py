"""Matrix products with bfloat16 arithmetic: x and weights are rounded to bfloat16, and sums are float32. An
element is one sum in the order of x's columns, so its bits do not depend on other rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cpu.bf16 import kernels
from tgis.shard.kernels.cpu.bf16.tile_product import TileProduct
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm import product as gemm
from tgis.shard.kernels.cpu.gemm.launch import check_rows
from tgis.shard.kernels.cpu.gemm.product import PackedProduct
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty

Packer = Callable[[Stored], "PackedProduct | RoundedProduct | TileProduct"]

_UNIT = 16384  # numbers per unit of work when rounding


@dataclass(frozen=True, eq=False)
class RoundedProduct:
    """Product of rounded numbers in float32, for all processors. Slower than float32 arithmetic."""

    product: PackedProduct

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self.product.in_features)
        num_rows, size = x.shape
        rounded = empty(num_rows, size)
        rows_per_unit = max(1, _UNIT // size)
        run = kernels.round_rows if num_rows <= rows_per_unit else kernels.round_rows.parallel
        run(num_rows, size, rows_per_unit, x.data_ptr(), rounded.data_ptr())
        return self.product(rounded)


def pack_rounded(weight: Stored) -> RoundedProduct:
    """Pack a weight for all processors."""
    return RoundedProduct(gemm.pack(weight, torch.bfloat16))


def pairs_packer(kernel: Kernel) -> Packer:
    """Return the function that packs weights for a kernel that multiplies pairs."""

    def pack(weight: Stored) -> PackedProduct:
        num_pairs = -(-weight.shape[1] // pairs.COLUMNS)
        return gemm.pack_elements(weight, _pair_up, num_pairs * pairs.NUM_BYTES, kernel)

    return pack


def _pair_up(piece: Tensor) -> Tensor:
    """Round [num_rows, in_features] to pairs, int32 [num_rows, num_pairs]. An odd last column is paired with
    0."""
    rounded = functional.pad(piece.to(torch.bfloat16), (0, piece.shape[1] % pairs.COLUMNS))
    # The second number in memory is the upper half of a pair.
    swapped = rounded.view(len(piece), -1, pairs.COLUMNS).flip(-1)
    return swapped.flatten(1).view(torch.int32)
