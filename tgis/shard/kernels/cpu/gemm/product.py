"""Matrix product of float32 rows and a weight packed in panels."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored, read_pieces
from tgis.shard.kernels.cpu.gemm.kernels import MULTIPLY
from tgis.shard.kernels.cpu.gemm.launch import check_rows, choose_run
from tgis.shard.kernels.cpu.gemm.pack import PACK
from tgis.shard.kernels.cpu.gemm.panels import PANEL, arena, count_panels
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty

logger = logging.getLogger(__name__)

# Range of a matrix's largest magnitude in which float16 is precise. Above, values become infinite; below,
# many values are subnormal and lose digits.
FLOAT16_MAX = 65504.0
FLOAT16_SMALL = 2.0**-10
_PIECE = 1 << 20  # approximate number of elements read, converted and packed at a time
_MIN_PARALLEL = 1 << 16  # minimum multiplications for several threads


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]. Each element is one sum
    in the order of x's columns, so its bits do not depend on other rows."""

    panels: Tensor  # uint8, panels in the layout of `kernel`
    in_features: int
    out_features: int
    kernel: Kernel

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self.in_features)
        num_rows = len(x)
        y = empty(num_rows, self.out_features)
        if num_rows:
            run = choose_run(self.kernel, num_rows * self.in_features * self.out_features, _MIN_PARALLEL)
            sizes = (num_rows, self.out_features, self.in_features, torch.get_num_threads())
            run(*sizes, x.data_ptr(), self.panels.data_ptr(), y.data_ptr())
        return y


def pack(weight: Stored, dtype: torch.dtype) -> PackedProduct:
    """Implement `Kernels.pack`. A matrix outside the range of float16 stays float32, with a warning."""
    largest = torch.tensor(0.0)  # NaN if a weight is

    def convert(piece: Tensor) -> Tensor:
        nonlocal largest
        if dtype == torch.float16 and piece.dtype != torch.float16:
            largest = largest.maximum(torch.stack(piece.aminmax()).abs().amax())
        return piece.to(dtype)

    product = pack_elements(weight, convert, weight.shape[1] * dtype.itemsize, MULTIPLY[dtype])
    if not (largest == 0 or FLOAT16_SMALL <= largest <= FLOAT16_MAX):
        logger.warning("%s does not fit float16 and is kept as float32", weight.label)
        return pack(weight, torch.float32)
    return product


def pack_elements(
    weight: Stored, convert: Callable[[Tensor], Tensor], row_bytes: int, kernel: Kernel
) -> PackedProduct:
    """Pack a weight for a kernel. `convert` converts rows to elements of panels, `row_bytes` bytes per
    row."""
    out_features, in_features = weight.shape
    size = row_bytes * PANEL  # bytes of a panel
    panels = arena.allocate(count_panels(out_features) * size)
    for rows, piece in read_pieces(weight, _PIECE, PANEL):
        elements = convert(piece)
        to = panels[rows.start // PANEL * size :]
        PACK[elements.itemsize].parallel(*elements.shape, elements.data_ptr(), to.data_ptr())
    return PackedProduct(panels, in_features, out_features, kernel)
