"""Compiled kernels of products with bfloat16 arithmetic: one for processors that multiply pairs of bfloat16
numbers, and one that only rounds, after which products in float32 give the same."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.kernels import multiply
from tgis.shard.kernels.cpu.gemm.operands import Kind
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, ordered, pointer

_U32 = np.uint32(0)  # of a float32's bits, and of a pair
_PAIRS = Kind(4 * PANEL, element=_U32, factor=_U32, columns=pairs.COLUMNS, is_widened=False)
_MAGNITUDE, _INFINITE, _QUIET = 0x7FFFFFFF, 0x7F800000, 0x00400000
_UPPER, _HALF = 0xFFFF0000, 0x7FFF  # the bits that stay, and what rounds them to nearest with their last one


@ordered
def _round(x: int, out: int, n: int) -> None:
    source, rounded = carray(pointer(x, _U32), (n,)), carray(pointer(out, _U32), (n,))
    for i in range(n):
        bits = np.int64(source[i])
        is_nan = (bits & _MAGNITUDE) > _INFINITE
        changed = bits | _QUIET if is_nan else bits + _HALF + (bits >> 16 & 1)
        rounded[i] = changed & _UPPER


def _round_rows(args: Any) -> None:
    """Round rows of float32 to bfloat16, kept as float32."""
    a = carray(args, 6)
    num_rows, size, rows_per_unit = a[1], a[2], a[3]
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        rows = min(num_rows - first, rows_per_unit)
        _round(a[4] + 4 * first * size, a[5] + 4 * first * size, rows * size)
        first = next_unit(args) * rows_per_unit


def _multiply_pairs(args: Any) -> None:
    multiply(args, _PAIRS)


round_rows = Kernel(_round_rows)
MULTIPLY_PAIRS = Kernel(_multiply_pairs) if pairs.is_supported() else None
"""None if the processor does not multiply pairs."""
