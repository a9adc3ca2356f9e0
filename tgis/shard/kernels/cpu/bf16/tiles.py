"""Compiled kernels of products with bfloat16 arithmetic on AMX tiles. x is rounded once to rows of pairs.
Panels are also rows of pairs, and both are zero-padded to whole tiles."""

from typing import Any, NamedTuple

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
from tgis.shard.kernels.cpu.pointwise.activations import multiply_row

COLUMNS = 32  # columns of x in a row of a tile

_F32, _BF16 = np.float32(0), np.uint16(0)
# Maximum tiles of columns per pass; with those of a panel, they fill three quarters of the first-level cache.
_MAX_BLOCK = 9
_MAX_ROWS, _MAX_PANELS = 128, 8  # maximum rows and panels of a unit of work
_MAX_STREAMED = 64  # maximum rows of products for which reading the weights takes longer than multiplying
_LINE = 64  # bytes of a cache line
_SUMS_BYTES = _MAX_ROWS * PANEL_ROW  # of a unit's rows and one panel


class TileProductKernels(NamedTuple):
    multiply: Kernel
    multiply_gated: Kernel


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
    num_blocks = -(-steps // _MAX_BLOCK)
    for block in range(num_blocks):
        begin = block * steps // num_blocks
        count = (block + 1) * steps // num_blocks - begin
        weights = panel + begin * DEPTH * PANEL_ROW
        for row in range(0, rows, ROWS):
            height = min(ROWS, rows - row)
            if height != configured:
                write_shapes(memory, height, DEPTH)
                configure(memory)
                configured = height
            source = x + row * stride + begin * ROW_BYTES
            to = sums + row * PANEL_ROW
            is_last = begin + count == steps
            place, apart = (out + row * out_stride, out_stride) if is_last else (to, PANEL_ROW)
            given = (memory, to, place, apart, source, stride, height, weights, count)
            multiply(*given, begin == 0, PAIRS, rows <= _MAX_STREAMED)
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
        first, begin = unit % groups * _MAX_ROWS, unit // groups * unit_panels
        rows = min(_MAX_ROWS, m - first)
        for p in range(begin, min(begin + unit_panels, num_panels)):
            panel = weights + p * steps * DEPTH * PANEL_ROW
            source = x + first * steps * ROW_BYTES
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


@ordered
def _write_gated(kind: int, sums: int, rows: int, out: int, stride: int) -> None:
    """Write activation(gate) * up, rounded, to rows that are `stride` bytes apart. `sums` is the address of
    the gates, [rows, PANEL], that of as many rows of ups, and memory for as many results."""
    count = rows * PANEL
    gates = carray(pointer(sums, _F32), (count,))
    ups = carray(pointer(sums + _SUMS_BYTES, _F32), (count,))
    results = carray(pointer(sums + 2 * _SUMS_BYTES, _F32), (count,))
    multiply_row(kind, gates, ups, results)
    for r in range(rows):
        rounded = carray(pointer(out + r * stride, _BF16), (PANEL,))
        for c in range(PANEL):
            rounded[c] = stored(results[r * PANEL + c], _BF16)


def _multiply_gated_tiles(args: Any) -> None:
    """Compute a product whose columns are gates, then as many ups, both whole panels, and write
    activation(gate) * up, rounded to bfloat16. Units of work are those of `_multiply_tiles` for the gates."""
    m, n, steps, threads, x, weights, y, kind = operands(args, 1, 8)
    groups = -(-m // _MAX_ROWS)
    num_panels = n // PANEL
    unit_panels = max(1, min(_MAX_PANELS, num_panels * groups // (8 * threads)))
    group_units = -(-num_panels // unit_panels)
    scratch = np.empty(_LINE + 3 * _SUMS_BYTES + MEMORY_BYTES, np.uint8)
    sums: Any = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    memory = sums + 3 * _SUMS_BYTES
    configured = 0
    unit = next_unit(args)
    while unit < groups * group_units:
        first, begin = unit % groups * _MAX_ROWS, unit // groups * unit_panels
        rows = min(_MAX_ROWS, m - first)
        source = x + first * steps * ROW_BYTES
        for p in range(begin, min(begin + unit_panels, num_panels)):
            for part in range(2):
                panel = weights + (p + part * num_panels) * steps * DEPTH * PANEL_ROW
                to = sums + part * _SUMS_BYTES
                configured = _multiply_panel(
                    memory, to, to, PANEL_ROW, source, steps, rows, configured, panel
                )
            _write_gated(kind, sums, rows, y + 2 * (first * n + p * PANEL), 2 * n)
        unit = next_unit(args)
    if configured > 0:
        release(memory)
    keep_alive(scratch)


round_pairs = Kernel(_round_pairs)
TILE_KERNELS = (
    None
    if instructions.INSTRUCTIONS is None
    else TileProductKernels(Kernel(_multiply_tiles), Kernel(_multiply_gated_tiles))
)
"""None if the processor has no AMX."""
