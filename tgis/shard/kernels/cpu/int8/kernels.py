"""Compiled kernels of int8 products. Codes of weights are packed once. Activations are quantized in each
product by the rule of `quant/schemes/int8.py`. Codes are stored plus 128, as unsigned bytes; a correction for
each group of activations removes the offset from the sums."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.int8 import tiles
from tgis.shard.kernels.cpu.int8.inner_loop import HEADER, INSTRUCTION_SET, LINE, QUAD, make_tile
from tgis.shard.kernels.cpu.int8.quantize import OFFSET, make_quantizer
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    atomic_add,
    load_acquire,
    next_unit,
    operands,
    ordered,
    pointer,
)
from tgis.shard.quant.schemes.int8 import GROUP

COLUMNS = INSTRUCTION_SET.columns  # columns per panel
ROWS = INSTRUCTION_SET.rows
PANEL_GROUP = (GROUP + 4) * COLUMNS  # bytes of a group and its scales
WIDTH = INSTRUCTION_SET.width
X_GROUP = HEADER + GROUP * WIDTH  # bytes of a group of activations

_F32, _I8, _U8 = np.float32(0), np.int8(0), np.uint8(0)
# The upper 32 bits of the counter count finished units of quantization, the lower 32 bits count started
# units.
_ONE_FINISHED = 1 << 32
_UNITS = (1 << 32) - 1
_MAX_POLLS = 1 << 14  # polls of the counter before a waiting thread quantizes all rows itself

TALLEST, TALL, PAIR, ONE = ROWS
_tile_tallest, _tile_tall, _tile_pair, _tile_one = (make_tile(rows) for rows in ROWS)
quantize_group = make_quantizer(WIDTH)
_count_finished = atomic_add(_ONE_FINISHED, "release")


@ordered
def _quantize_rows(x: int, in_features: int, first: int, stop: int, out: int, stride: int) -> None:
    for row in range(first, stop):
        for group in range(-(-in_features // GROUP)):
            n = min(GROUP, in_features - group * GROUP)
            start = x + 4 * (row * in_features + group * GROUP)
            quantize_group(start, n, -(-n // QUAD) * QUAD, out + row * stride + group * X_GROUP)


@ordered
def _multiply_rows(
    out: int,
    width: int,
    x: int,
    stride: int,
    rows: int,
    panel: int,
    groups: int,
    quads: int,
    columns: int,
    ahead: int,
) -> None:
    """Multiply rows by a panel in tiles. A row's chain source sums is the same for every tile height. If
    there are several source the tallest tiles, each prefetches a part source the next panel, at `ahead`."""
    row = 0
    num_tiles = rows // TALLEST
    lines = -(-PANEL_GROUP // (LINE * num_tiles)) if num_tiles > 1 else 0
    while row < rows:
        to = out + row * width
        source = x + row * stride
        left = rows - row
        if left >= TALLEST and lines:
            _tile_tallest(to, width, source, stride, panel, groups, quads, columns, ahead, lines)
            ahead += groups * lines * LINE
            row += TALLEST
        elif left >= TALLEST:  # the constant 0 removes the code for prefetching
            _tile_tallest(to, width, source, stride, panel, groups, quads, columns, ahead, 0)
            row += TALLEST
        elif left >= TALL:
            _tile_tall(to, width, source, stride, panel, groups, quads, columns, ahead, 0)
            row += TALL
        elif left >= PAIR:
            _tile_pair(to, width, source, stride, panel, groups, quads, columns, ahead, 0)
            row += PAIR
        else:
            _tile_one(to, width, source, stride, panel, groups, quads, columns, ahead, 0)
            row += ONE


class _Product(NamedTuple):
    num_rows: int
    in_features: int
    out_features: int
    x: int
    panels: int
    quantized: int
    out: int
    row_bytes: int  # bytes of a row of `quantized`


@ordered
def _multiply_panels(
    w: Any, first: int, rows: int, begin: int, end: int, following: int, min_tile_rows: int | None
) -> None:
    """Multiply `rows` rows, beginning with `first`, by panels [begin, end). AMX is used for at least
    `min_tile_rows` rows; None: never, and numba does not compile that code. The thread's next panel is
    `following`."""
    groups = -(-w.in_features // GROUP)
    quads = -(-(w.in_features - (groups - 1) * GROUP) // QUAD)  # quads source the last group
    panel_bytes = (groups - 1) * PANEL_GROUP + (QUAD * quads + 4) * COLUMNS
    width = 4 * w.out_features
    stride = w.row_bytes
    for p in range(begin, end):
        columns = min(COLUMNS, w.out_features - p * COLUMNS)
        out = w.out + first * width + 4 * p * COLUMNS
        panel = w.panels + p * panel_bytes
        source = w.quantized + first * stride
        next_p = p + 1 if p + 1 < end else following
        ahead = w.panels + next_p * panel_bytes
        if min_tile_rows is None or rows < min_tile_rows:
            _multiply_rows(out, width, source, stride, rows, panel, groups, quads, columns, ahead)
        else:
            tiles.multiply_rows(out, width, source, stride, rows, panel, groups, quads, columns)


@ordered
def _await_quantized(args: Any, num_parts: int, w: Any) -> None:
    """Wait until all rows are quantized. If another thread seems to have lost its core, quantize all rows
    here. Writing the same bytes twice is harmless."""
    polls = 0
    while load_acquire(args) >> 32 < num_parts:
        polls += 1
        if polls == _MAX_POLLS:
            _quantize_rows(w.x, w.in_features, 0, w.num_rows, w.quantized, w.row_bytes)
            break


@ordered
def _multiply(args: Any, min_tile_rows: int | None) -> None:
    """Compute a product. The first units of work quantize rows; the others multiply rows by runs of
    panels."""
    w = _Product(*operands(args, 1, 8))
    rows_per_part, rows_per_chunk, panels_per_run, threads = operands(args, 9, 4)
    num_parts = -(-w.num_rows // rows_per_part)
    num_panels = -(-w.out_features // COLUMNS)
    num_runs = -(-num_panels // panels_per_run)
    unit = next_unit(args) & _UNITS
    while unit < num_parts:
        first = unit * rows_per_part
        stop = min(first + rows_per_part, w.num_rows)
        _quantize_rows(w.x, w.in_features, first, stop, w.quantized, w.row_bytes)
        _count_finished(args)
        unit = next_unit(args) & _UNITS
    _await_quantized(args, num_parts, w)
    unit -= num_parts
    while unit < num_runs * -(-w.num_rows // rows_per_chunk):
        next_one = unit + threads  # if all threads are equally fast
        first, begin = unit // num_runs * rows_per_chunk, unit % num_runs * panels_per_run
        rows, end = min(rows_per_chunk, w.num_rows - first), min(begin + panels_per_run, num_panels)
        _multiply_panels(w, first, rows, begin, end, next_one % num_runs * panels_per_run, min_tile_rows)
        unit = (next_unit(args) & _UNITS) - num_parts


def _multiply_int8(args: Any) -> None:
    _multiply(args, None)


def _multiply_int8_tiles(args: Any) -> None:
    _multiply(args, tiles.FEWEST_ROWS)


@ordered
def _pack_column(codes: int, scales: int, in_features: int, panel: int) -> None:
    """Pack a row of the matrix as a column of a panel. panel: address of the column's first quad."""
    for group in range(-(-in_features // GROUP)):
        n = min(GROUP, in_features - group * GROUP)
        values = carray(pointer(codes + group * GROUP, _I8), (n,))
        at = panel + group * PANEL_GROUP
        num_quads = -(-n // QUAD)
        quads = carray(pointer(at, _U8), (num_quads, COLUMNS * QUAD))
        for i in range(n):
            quads[i // QUAD, i % QUAD] = np.int32(values[i]) + OFFSET
        for i in range(n, num_quads * QUAD):
            quads[i // QUAD, i % QUAD] = OFFSET
        # The scales follow the quads. A scale has the size of a quad.
        scale_address = at + num_quads * QUAD * COLUMNS
        carray(pointer(scale_address, _F32), (1,))[0] = carray(pointer(scales + 4 * group, _F32), (1,))[0]


def _pack_codes(args: Any) -> None:
    """Pack rows of codes and their scales as columns of panels, beginning with column `first`."""
    num_rows, in_features, first, codes, scales, panels, panel_bytes = operands(args, 1, 7)
    num_groups = -(-in_features // GROUP)
    row = next_unit(args)
    while row < num_rows:
        column = first + row
        panel = panels + column // COLUMNS * panel_bytes + QUAD * (column % COLUMNS)
        _pack_column(codes + row * in_features, scales + 4 * row * num_groups, in_features, panel)
        row = next_unit(args)


multiply_int8, pack_codes = Kernel(_multiply_int8), Kernel(_pack_codes)
MULTIPLY_INT8_TILES = Kernel(_multiply_int8_tiles) if tiles.IS_SUPPORTED else None
"""None if the processor has no AMX."""
