"""Matrix product of float32 rows with a weight packed in panels."""

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

# Bounds on a matrix's largest magnitude within which float16 keeps it well. Above, values become infinite;
# below, many values are subnormal and lose digits.
FLOAT16_MAX, FLOAT16_SMALL = 65504.0, 2.0**-10
_PIECE = 1 << 22  # approximate number of elements that are converted and packed at a time
_ALONE = 1 << 16  # with fewer multiplications, waking a second thread does not pay
_KERNELS = {
    torch.float32: kernels.multiply_float32,
    torch.float16: kernels.multiply_float16,
    torch.bfloat16: kernels.multiply_bfloat16,
}


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]. Each element is one sum
    in the order of x's columns, so its bits do not depend on the other rows."""

    panels: Tensor  # uint8 memory of panels [in_features, PANEL] of the type that `kernel` reads
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
    """Implement `Kernels.pack`. A matrix that does not fit float16 stays float32, with a warning."""
    if dtype == torch.float16 and weight.dtype != torch.float16 and not _fits_float16(weight):
        logger.warning("%s does not fit float16 and is kept as float32", label)
        dtype = torch.float32
    out_features, in_features = weight.shape
    size = dtype.itemsize * PANEL * in_features  # bytes of a panel
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
