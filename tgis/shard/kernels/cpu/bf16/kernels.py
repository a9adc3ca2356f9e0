"""Compiled kernels of products with bfloat16 arithmetic: one for processors that multiply pairs of bfloat16,
and one that only rounds, after which float32 products give the same bits."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.kernels import multiply
from tgis.shard.kernels.cpu.gemm.operands import PanelKind
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, operands, ordered, pointer
from tgis.shard.kernels.cpu.jit.scalar_math import loaded, stored

_F32, _BF16, _PAIR = np.float32(0), np.uint16(0), np.uint32(0)
_PAIRS = PanelKind(4 * PANEL, element=_PAIR, factor=_PAIR, columns=pairs.COLUMNS, is_widened=False)


@ordered
def _round(x: int, out: int, n: int) -> None:
    source, rounded = carray(pointer(x, _F32), (n,)), carray(pointer(out, _F32), (n,))
    for i in range(n):
        rounded[i] = loaded(stored(source[i], _BF16))


def _round_rows(args: Any) -> None:
    """Round rows of float32 to values of bfloat16."""
    num_rows, size, rows_per_unit, x, out = operands(args, 1, 5)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        rows = min(num_rows - first, rows_per_unit)
        _round(x + 4 * first * size, out + 4 * first * size, rows * size)
        first = next_unit(args) * rows_per_unit


def _multiply_pairs(args: Any) -> None:
    multiply(args, _PAIRS)


round_rows = Kernel(_round_rows)
MULTIPLY_PAIRS = Kernel(_multiply_pairs) if pairs.is_supported() else None
"""None if the processor does not multiply pairs."""
