"""Compiled kernels of products with codes on AMX tiles, with bfloat16 arithmetic: x is rounded to bfloat16,
codes are converted exactly, and sums are float32.

The codes of a piece are widened once for all rows of x. An element is a chain of multiply-adds of the pieces'
sums and their scales, and of the sums of x's columns and the offsets. A piece's sum adds 32 columns of x at a
time, as AMX does. So an element's bits depend only on its row and weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.amx.inner_loop import MEMORY_BYTES, configure, open_tiles, release
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, SHAPES_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.inner_loop import load_zeros, prefetch_lines
from tgis.shard.kernels.cpu.codes.kernels import (
    copy_sums,
    count_pieces,
    count_units,
    find_ahead,
    find_zeros,
    panel_bytes,
    read_matrix,
)
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, PIECE, PLANE, VECTORS
from tgis.shard.kernels.cpu.codes.scales import find_scales
from tgis.shard.kernels.cpu.codes.tiles.chains import FEW_ROWS, multiply_few_rows
from tgis.shard.kernels.cpu.codes.tiles.pairs import PAIR_ROW, UNIT_PAIRS, widen_to_pairs
from tgis.shard.kernels.cpu.codes.tiles.rows import (
    FLOAT_ROW,
    STEP_UNITS,
    count_row_bytes,
    count_rows_bytes,
    round_rows,
)
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    inlined,
    keep_alive,
    llvm_function,
    next_unit,
    operands,
    ordered,
    pointer,
)
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I64

_WIDE_PIECE = PIECE // 2 * PAIR_ROW  # bytes of a piece that is widened to pairs
_CELLS = TILE_ROWS * PAIR_ROW  # bytes of the sums of a piece
_PAGE = 4096
_MAX_PANELS = 8  # maximum panels of a unit of work
_CHUNK = 5 << 17  # bytes of a copy of x, which stays in a core's cache
_F32, _U16 = np.float32(0), np.uint16(0)
_U8, _I8 = np.uint8(0), np.int8(0)
_2_BITS, _3_BITS, _5_BITS, _6_BITS = np.float32(0), np.float64(0), np.uint64(0), np.complex64(0)
# Tiles: sums of a panel's vectors, rows of x, and vectors of a panel in turns.
_X, _WEIGHTS, _NUM_WEIGHTS = VECTORS, VECTORS + 1, 3
_WIDTHS_AT, _ROWS_AT, _NUM_SHAPES = 16, 48, 16  # offsets in the configuration, and its number of tiles


@ordered
def write_code_shapes(memory: int, rows: int, depth: int) -> None:
    """Write the tile configuration for `rows` (1 to TILE_ROWS) rows of x and `depth` pairs per step."""
    carray(pointer(memory, _U8), (SHAPES_BYTES,))[:] = 0
    carray(pointer(memory, _U8), (1,))[0] = 1
    widths = carray(pointer(memory + _WIDTHS_AT, _U16), (_NUM_SHAPES,))
    heights = carray(pointer(memory + _ROWS_AT, _U8), (_NUM_SHAPES,))
    for tile in range(VECTORS):
        widths[tile], heights[tile] = ROW_BYTES, rows
    widths[_X], heights[_X] = 4 * depth, rows
    for tile in range(_WEIGHTS, _WEIGHTS + _NUM_WEIGHTS):
        widths[tile], heights[tile] = ROW_BYTES, depth


@llvm_function()
def _multiply_piece(
    b: Any, memory: Any, cells: Any, x: Any, stride: Any, pairs: Any, steps: Any, step_bytes: Any
) -> None:
    """Compute cells[:rows, :COLUMNS] = x[:rows] @ a widened piece, for the configured number of rows. Rows of
    x are `stride` bytes apart, and steps of the piece `step_bytes`."""
    tiles = open_tiles(b, memory)
    for v in range(VECTORS):
        tiles.clear(v)

    def add_step(k: Any, _: list[Any]) -> list[Any]:
        tiles.load(_X, b.add(x, b.mul(k, I64(ROW_BYTES))), stride)
        begin = b.add(pairs, b.mul(k, step_bytes))
        for v in range(VECTORS):
            weights = _WEIGHTS + v % _NUM_WEIGHTS
            tiles.load(weights, b.add(begin, I64(ROW_BYTES * v)), I64(PAIR_ROW))
            tiles.add_pairs(v, _X, weights)
        return []

    llvm.loop(b, steps, [], add_step)
    for v in range(VECTORS):
        tiles.store(v, b.add(cells, I64(ROW_BYTES * v)), I64(PAIR_ROW))


@llvm_function()
def _add_cells(
    b: Any,
    sums: Any,
    cells: Any,
    rows: Any,
    row_sums: Any,
    scales: Any,
    offsets: Any,
    zeros: Any,
) -> None:
    """Compute sums[:rows] += row sums * offsets, then sums += (cells - zeros * row sums) * scales.
    offsets, zeros: addresses, or 0."""
    places = [I64(4 * LANES * v) for v in range(VECTORS)]
    factors = [llvm.load_vector(b, b.add(scales, place), LANES) for place in places]

    def add_rows(added: list[Any], subtracted: list[Any]) -> None:
        def add_row(r: Any, _: list[Any]) -> list[Any]:
            begin = b.mul(r, I64(PAIR_ROW))
            row_sum = llvm.load_broadcast(b, b.add(row_sums, b.mul(r, I64(4))), LANES) if added else None
            for v, place in enumerate(places):
                at = b.add(sums, b.add(begin, place))
                cell = llvm.load_vector(b, b.add(cells, b.add(begin, place)), LANES)
                total = llvm.load_vector(b, at, LANES)
                if added:
                    cell = b.fsub(cell, b.fmul(subtracted[v], row_sum, **FUSED), **FUSED)
                    total = llvm.multiply_add(b, row_sum, added[v], total)
                llvm.store_vector(b, llvm.multiply_add(b, cell, factors[v], total), at)
            return []

        llvm.loop(b, rows, [], add_row)

    has_sums = b.icmp_signed("!=", b.or_(offsets, zeros), I64(0))
    with b.if_else(has_sums) as (with_sums, without):
        with with_sums:
            added = _load_or_zeros(
                b, offsets, lambda v: llvm.load_vector(b, b.add(offsets, places[v]), LANES)
            )
            add_rows(added, _load_or_zeros(b, zeros, lambda v: load_zeros(b, zeros, v)))
        with without:
            add_rows([], [])


def _load_or_zeros(b: Any, address: Any, load: Callable[[int], Any]) -> list[Any]:
    """Emit the loads of a panel's vectors, or zeros if the address is 0."""
    before = b.block
    with b.if_then(b.icmp_signed("!=", address, I64(0))):
        values = [load(v) for v in range(VECTORS)]
        inside = b.block
    zero = llvm.constant(0.0, LANES)
    return [llvm.choose(b, before, zero, inside, value) for value in values]


@ordered
def _multiply_panel(
    w: Any,
    memory: int,
    x: int,
    rows: int,
    configured: int,
    panel: int,
    following: int,
    scratch: int,
    element: Any,
) -> int:
    """Compute sums[rows, COLUMNS] = x @ a panel. The thread's next panel is `following`. `scratch` is the
    address of scales and offsets, two widened pieces, the sums of a piece, and the sums. Return the number of
    rows for which tiles are configured."""
    wide = scratch + 2 * PLANE
    next_wide = wide + _WIDE_PIECE
    cells = next_wide + _WIDE_PIECE
    sums = cells + _CELLS
    carray(pointer(sums, _F32), (rows * COLUMNS,))[:] = np.float32(0)
    at = w.panels + panel * panel_bytes(w)
    pieces = count_pieces(w)
    piece_bytes = w.units * w.unit_bytes + w.scale_bytes
    steps, depth = -(-w.units // STEP_UNITS), UNIT_PAIRS * min(w.units, STEP_UNITS)
    widen_to_pairs(wide, at + w.scale_bytes, count_units(w, 0), w.table, at + piece_bytes, element)
    for piece in range(pieces):
        units = count_units(w, piece)
        ahead = find_ahead(w, at, piece, pieces, following)
        prefetch_lines(ahead, w.scale_bytes)
        scales = find_scales(w, panel, piece, at, scratch, w.centre)
        # The next piece is widened first, because tiles cannot be loaded from memory that is just written.
        if piece + 1 < pieces:
            codes = at + piece_bytes + w.scale_bytes
            soon = ahead + w.scale_bytes
            widen_to_pairs(next_wide, codes, count_units(w, piece + 1), w.table, soon, element)
        offsets, zeros = (scales + PLANE) * w.has_offsets, find_zeros(w, panel, piece)
        begin = x + piece * count_rows_bytes(w, rows)
        for row in range(0, rows, TILE_ROWS):
            height = min(TILE_ROWS, rows - row)
            if height != configured:
                write_code_shapes(memory, height, depth)
                configure(memory)
                configured = height
            source, to = begin + row * w.row_bytes, sums + row * PAIR_ROW
            row_sums = begin + rows * w.row_bytes + 4 * row
            _multiply_piece(memory, cells, source, w.row_bytes, wide, steps, depth * PAIR_ROW)
            _add_cells(to, cells, height, row_sums, scales, offsets, zeros)
        wide, next_wide = next_wide, wide
        at += units * w.unit_bytes + w.scale_bytes
    return configured


@ordered
def _multiply_few(w: Any, x: int, rows: int, panel: int, following: int, scratch: int, element: Any) -> None:
    """Compute sums[rows, COLUMNS] = x @ a panel for at most FEW_ROWS rows. See `_multiply_panel`."""
    cells = scratch + 2 * PLANE + 2 * _WIDE_PIECE
    sums = cells + _CELLS
    carray(pointer(sums, _F32), (rows * COLUMNS,))[:] = np.float32(0)
    at = w.panels + panel * panel_bytes(w)
    pieces = count_pieces(w)
    for piece in range(pieces):
        units = count_units(w, piece)
        ahead = find_ahead(w, at, piece, pieces, following)
        prefetch_lines(ahead, w.scale_bytes)
        source = x + piece * count_rows_bytes(w, rows)
        scales = find_scales(w, panel, piece, at, scratch, w.centre)
        offsets, zeros = (scales + PLANE) * w.has_offsets, find_zeros(w, panel, piece)
        codes = at + w.scale_bytes
        soon = ahead + w.scale_bytes
        multiply_few_rows(rows, cells, source, w.row_bytes, codes, w.table, units, STEP_UNITS, soon, element)
        _add_cells(sums, cells, rows, source + rows * w.row_bytes, scales, offsets, zeros)
        at += units * w.unit_bytes + w.scale_bytes


@inlined
def _multiply(args: Any, bits: int, element: Any) -> None:
    """Compute a product. Units are ordered by groups of rows, so that threads can reuse copies of x."""
    m, width, threads, x, y, pitch = operands(args, 1, 6)
    is_few = m <= FEW_ROWS
    (units,) = operands(args, 10, 1)
    w = read_matrix(args, 7, bits, count_row_bytes(units, is_few), 0, TILE_ROWS)
    row_bytes = count_pieces(w) * w.row_bytes
    num_panels = -(-w.out_features // COLUMNS)
    max_rows = max(1, _CHUNK // (row_bytes * TILE_ROWS)) * TILE_ROWS
    groups = -(-m // max_rows)
    max_rows = -(-m // groups)
    unit_panels = max(1, min(_MAX_PANELS, num_panels * groups // (8 * threads)))
    group_units = -(-num_panels // unit_panels)
    before = 2 * PLANE + 2 * _WIDE_PIECE + _CELLS
    rows_bytes = count_pieces(w) * count_rows_bytes(w, max_rows)
    size = before + max_rows * PAIR_ROW + rows_bytes + FLOAT_ROW + MEMORY_BYTES
    memory_of = np.empty(_PAGE + size, np.uint8)
    scratch: Any = (np.int64(memory_of.ctypes.data) + _PAGE - 1) // _PAGE * _PAGE
    sums: Any = scratch + before
    rows_of_x: Any = sums + max_rows * PAIR_ROW
    float_row: Any = rows_of_x + rows_bytes
    memory: Any = float_row + FLOAT_ROW
    if not is_few and (w.units % STEP_UNITS or w.in_features % w.columns):
        # Codes after the last unit of a piece are multiplied by zeros, so they must be finite.
        carray(pointer(scratch, _U8), (before,))[:] = 0
    copied_group, configured = -1, 0
    unit = next_unit(args)
    while unit < groups * group_units:
        next_one = unit + threads  # if all threads are equally fast
        group = unit // group_units
        begin = unit % group_units * unit_panels
        first = group * m // groups
        rows = (group + 1) * m // groups - first
        if copied_group != group:
            round_rows(w, x + 4 * first * width, width, rows, float_row, rows_of_x, is_few, element)
            copied_group = group
        end = min(begin + unit_panels, num_panels)
        for panel in range(begin, end):
            following = panel + 1 if panel + 1 < end else next_one % group_units * unit_panels
            if is_few:
                _multiply_few(w, rows_of_x, rows, panel, following, scratch, element)
            else:
                configured = _multiply_panel(
                    w, memory, rows_of_x, rows, configured, panel, following, scratch, element
                )
            copy_sums(sums, rows, y + 4 * first * pitch, pitch, w.out_features, panel)
        unit = next_unit(args)
    if configured > 0:
        release(memory)
    keep_alive(memory_of)


def _multiply_4_bits_on_tiles(args: Any) -> None:
    _multiply(args, 4, _U8)


def _multiply_8_bits_on_tiles(args: Any) -> None:
    _multiply(args, 8, _I8)


def _multiply_2_bits_on_tiles(args: Any) -> None:
    _multiply(args, 2, _2_BITS)


def _multiply_3_bits_on_tiles(args: Any) -> None:
    _multiply(args, 3, _3_BITS)


def _multiply_5_bits_on_tiles(args: Any) -> None:
    _multiply(args, 5, _5_BITS)


def _multiply_6_bits_on_tiles(args: Any) -> None:
    _multiply(args, 6, _6_BITS)


MULTIPLY_ON_TILES: dict[int, Kernel] = {}
"""Kernels by the bits of codes; empty if the processor has no AMX."""
if instructions.INSTRUCTIONS is not None:
    MULTIPLY_ON_TILES |= {
        2: Kernel(_multiply_2_bits_on_tiles),
        3: Kernel(_multiply_3_bits_on_tiles),
        4: Kernel(_multiply_4_bits_on_tiles),
        5: Kernel(_multiply_5_bits_on_tiles),
        6: Kernel(_multiply_6_bits_on_tiles),
        8: Kernel(_multiply_8_bits_on_tiles),
    }
