"""Matrix products with int8 weights and activations. Sums of integers are exact, so a row's bits do not
depend on other rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cpu.gemm.launch import check_rows, choose_run
from tgis.shard.kernels.cpu.gemm.panels import arena
from tgis.shard.kernels.cpu.int8 import kernels
from tgis.shard.kernels.cpu.int8.inner_loop import HEADER, QUAD
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty
from tgis.shard.quant.schemes.int8 import GROUP

_PIECE = 1 << 17  # approximate number of weights read and packed at a time, so that they fit a core's cache
_PART = 1 << 14  # approximate number of activations per unit of quantization
_RUN = 8  # maximum panels per unit of multiplication
_CHUNK = 1 << 19  # bytes of activations that fit a core's cache
_MIN_PARALLEL = 1 << 19  # minimum multiplications for several threads


@dataclass(frozen=True, eq=False)
class Int8Product:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]."""

    panels: Tensor  # uint8, in the layout of `kernels.py`
    in_features: int
    out_features: int
    kernel: Kernel

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self.in_features)
        num_rows = len(x)
        row_bytes = _count_row_bytes(self.in_features)
        y = empty(num_rows, self.out_features)
        quantized = empty(num_rows, row_bytes // 4)
        sizes = (num_rows, self.in_features, self.out_features)
        addresses = (x.data_ptr(), self.panels.data_ptr(), quantized.data_ptr(), y.data_ptr())
        rows_per_part = max(1, _PART // self.in_features)
        rows_per_chunk = max(48, _CHUNK // row_bytes // 48 * 48)  # a multiple of every tile height
        num_panels = -(-self.out_features // kernels.COLUMNS) * -(-num_rows // rows_per_chunk)
        num_threads = torch.get_num_threads()
        panels_per_run = max(1, min(_RUN, num_panels // (8 * num_threads)))
        run = choose_run(self.kernel, num_rows * self.in_features * self.out_features, _MIN_PARALLEL)
        run(*sizes, *addresses, row_bytes, rows_per_part, rows_per_chunk, panels_per_run, num_threads)
        return y


def pack(weight: Stored, kernel: Kernel | None = None) -> Int8Product:
    """Pack the codes of a weight [out_features, in_features] for a kernel; None: the one that every processor
    supports. NaN scales, and rows of x with infinity or NaN, give NaN."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // kernels.COLUMNS)
    panel_bytes = _count_panel_bytes(in_features)
    panels = arena.allocate(num_panels * panel_bytes)
    num_rows = max(1, _PIECE // in_features)
    for first in range(0, out_features, num_rows):
        piece = weight.codes(slice(first, first + num_rows))
        addresses = (piece.values.data_ptr(), piece.scales.data_ptr(), panels.data_ptr())
        kernels.pack_codes.parallel(len(piece.values), in_features, first, *addresses, panel_bytes)
    return Int8Product(panels, in_features, out_features, kernel or kernels.multiply_int8)


def _count_panel_bytes(in_features: int) -> int:
    groups, values = _divide(in_features)
    return (groups + 1) * 4 * kernels.COLUMNS + (groups * GROUP + values) * kernels.COLUMNS


def _count_row_bytes(in_features: int) -> int:
    groups, values = _divide(in_features)
    return (groups + 1) * HEADER + (groups * GROUP + values) * kernels.WIDTH


def _divide(in_features: int) -> tuple[int, int]:
    """Return the number of groups before the last one, and the size of the last one, rounded up to quads."""
    groups, rest = divmod(in_features - 1, GROUP)
    return groups, (rest // QUAD + 1) * QUAD
