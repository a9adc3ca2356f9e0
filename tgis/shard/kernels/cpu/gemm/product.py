"""A weight in panels, and its products with rows of float32."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.kernels.cpu.gemm import kernels
from tgis.shard.kernels.cpu.gemm import pack as pack_kernels
from tgis.shard.kernels.cpu.gemm.panels import PANEL, arena, count_panels
from tgis.shard.kernels.cpu.jit import compiler
from tgis.shard.kernels.cpu.jit.compiler import Kernel

logger = logging.getLogger(__name__)

# The greatest number of a matrix that float16 keeps well: beyond lies infinity, and where all numbers are
# smaller, many are among those that lose digits.
FLOAT16_MAX, FLOAT16_SMALL = 65504.0, 2.0**-10
_PIECE = 1 << 22  # elements that are in memory in a second type while they are packed, about
_ALONE = 1 << 16  # multiplications that are not worth waking a second thread
_KERNELS = {
    torch.float32: kernels.multiply_float32,
    torch.float16: kernels.multiply_float16,
    torch.bfloat16: kernels.multiply_bfloat16,
}


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]. Each element is one sum in the
    order of x's columns: its bits are the same in any company."""

    panels: Tensor  # uint8, of panels [in_features, PANEL] of a type that `kernel` knows
    in_features: int
    out_features: int
    kernel: Kernel

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert x.shape[1] == self.in_features
        num_rows = len(x)
        y = compiler.empty(num_rows, self.out_features)
        if num_rows:
            is_small = num_rows * self.in_features * self.out_features < _ALONE
            run = self.kernel if is_small else self.kernel.spread
            sizes = (num_rows, self.out_features, self.in_features, torch.get_num_threads())
            run(*sizes, x.data_ptr(), self.panels.data_ptr(), y.data_ptr())
        return y


def pack(weight: Tensor, dtype: torch.dtype, label: str) -> PackedProduct:
    """As in `Kernels`. For float16, a matrix that would lose by it stays float32, with a warning."""
    if dtype == torch.float16 and weight.dtype != torch.float16 and not _fits_float16(weight):
        logger.warning("%s does not fit float16 and is kept as float32", label)
        dtype = torch.float32
    out_features, in_features = weight.shape
    size = dtype.itemsize * PANEL * in_features  # of a panel
    panels = arena.allocate(count_panels(out_features) * size)
    move = pack_kernels.pack_16_bits if dtype.itemsize == 2 else pack_kernels.pack_32_bits
    num_rows = max(1, _PIECE // (PANEL * in_features)) * PANEL
    for first in range(0, out_features, num_rows):
        piece = weight[first : first + num_rows].to(dtype).contiguous()
        to = panels[first // PANEL * size :]
        move.spread(*piece.shape, piece.data_ptr(), to.data_ptr())
    return PackedProduct(panels, in_features, out_features, _KERNELS[dtype])


def _fits_float16(weight: Tensor) -> bool:
    low, high = weight.aminmax()
    most = float(max(-low, high))
    return most == 0 or FLOAT16_SMALL <= most <= FLOAT16_MAX
