"""Compiled kernels of products with bfloat16 arithmetic on AMX tiles. x is rounded once to rows of pairs.
Panels are also rows of pairs, and both are zero-padded to whole tiles."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.amx.inner_loop import (
    DEPTH,
    MEMORY_BYTES,
    PAIRS,
    PANEL,
    PANEL_ROW,
    ROWS,
    configure,
    copy_sums,
    multiply,
    release,
    write_shapes,
)
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES
from tgis.shard.kernels.cpu.jit.compiler import Kernel, keep_alive, next_unit, operands, ordered, pointer
from tgis.shard.kernels.cpu.jit.scalar_math import stored

COLUMNS = 32  # columns of x in a row of a tile

_F32, _BF16 = np.float32(0), np.uint16(0)
_BLOCK = 8  # tiles of columns per pass; with those of a panel, they fill two thirds of the first-level cache
_MAX_ROWS, _MAX_PANELS = 128, 8  # maximum rows and panels of a unit of work
_LINE = 64  # bytes of a cache line


@ordered
def _round_row(x: int, n: int, out: int, padded: int) -> None:
    source, rounded = carray(pointer(x, _F32), (n,)), carray(pointer(out, _BF16), (padded,))
    for i in range(n):
        rounded[i] = stored(source[i], _BF16)
    for i in range(n, padded):
        rounded[i] = 0


def _round_pairs(args: Any) -> None:
    """Round rows of float32 to bfloat16, zero-padded."""
    num_rows, size, padded, rows_per_unit, x, out = operands(args, 1, 6)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for row in range(first, min(first + rows_per_unit, num_rows)):
            _round_row(x + 4 * row * size, size, out + 2 * row * padded, padded)
        first = next_unit(args) * rows_per_unit


@ordered
def _multiply_panel(
    memory: int,
    sums: int,
    out: int,
    out_stride: int,
    x: int,
    steps: int,
    rows: int,
    configured: int,
    panel: int,
) -> int:
    """Compute the product of rows of x and a panel of `steps` tiles, and store it in out. Return the number
    of rows for which tiles are configured."""
    stride = steps * ROW_BYTES
    for begin in range(0, steps, _BLOCK):
        weights = panel + begin * DEPTH * PANEL_ROW
        count = min(_BLOCK, steps - begin)
        for row in range(0, rows, ROWS):
            height = min(ROWS, rows - row)
            if height != configured:
                write_shapes(memory, height, DEPTH)
                configure(memory)
                configured = height
            source, to = x + row * stride + begin * ROW_BYTES, sums + row * PANEL_ROW
            is_last = begin + count == steps
            place, apart = (out + row * out_stride, out_stride) if is_last else (to, PANEL_ROW)
            multiply(memory, to, place, apart, source, stride, height, weights, count, begin == 0, PAIRS)
    return configured


def _multiply_tiles(args: Any) -> None:
    """Compute a product. A unit of work is several rows and panels."""
    m, n, steps, threads, x, weights, y = operands(args, 1, 7)
    groups, num_panels = -(-m // _MAX_ROWS), -(-n // PANEL)
    unit_panels = max(1, min(_MAX_PANELS, num_panels * groups // (8 * threads)))
    group_units = -(-num_panels // unit_panels)
    scratch = np.empty(_LINE + _MAX_ROWS * PANEL_ROW + MEMORY_BYTES, np.uint8)
    sums: Any = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    memory = sums + _MAX_ROWS * PANEL_ROW
    configured = 0
    unit = next_unit(args)
    while unit < groups * group_units:
        first, begin = unit // group_units * _MAX_ROWS, unit % group_units * unit_panels
        rows = min(_MAX_ROWS, m - first)
        for p in range(begin, min(begin + unit_panels, num_panels)):
            panel, source = weights + p * steps * DEPTH * PANEL_ROW, x + first * steps * ROW_BYTES
            columns = min(PANEL, n - p * PANEL)
            out = y + 4 * (first * n + p * PANEL)
            stride = 4 * n
            to, apart = (out, stride) if columns == PANEL else (sums, PANEL_ROW)
            configured = _multiply_panel(memory, sums, to, apart, source, steps, rows, configured, panel)
            if columns < PANEL:
                copy_sums(sums, rows, columns, out, stride, _F32)
        unit = next_unit(args)
    if configured > 0:
        release(memory)
    keep_alive(scratch)


round_pairs = Kernel(_round_pairs)
MULTIPLY_TILES = None if instructions.INSTRUCTIONS is None else Kernel(_multiply_tiles)
"""None if the processor has no AMX."""
