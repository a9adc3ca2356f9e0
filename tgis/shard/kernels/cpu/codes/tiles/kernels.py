"""Compiled kernels of products with codes on AMX tiles. With bfloat16 arithmetic, x is rounded to bfloat16,
codes are converted exactly, and sums are float32. With activations rounded to 8 bits, a piece's sums are
exact integers, so products have the same bits as those without tiles.

The codes of a piece are widened once for all rows of x. An element is a chain of multiply-adds of the pieces'
sums and their scales, and of the sums of x's columns and the offsets. A piece's sum of floats adds 32 columns
of x at a time, as AMX does. So an element's bits depend only on its row and weights."""

from typing import Any

import numpy as np

from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.amx.inner_loop import MEMORY_BYTES, release
from tgis.shard.kernels.cpu.amx.instructions import TILE_ROWS
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.kernels import count_pieces, read_matrix
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, Kind
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.codes.tiles.chains import FEW_ROWS
from tgis.shard.kernels.cpu.codes.tiles.panel import (
    SCRATCH_BYTES,
    clear_scratch,
    multiply_panel,
    multiply_panel_by_few,
    place_scratch,
)
from tgis.shard.kernels.cpu.codes.tiles.rows import (
    FLOAT_ROW,
    RoundedRows,
    count_row_bytes,
    count_step_units,
    place_rows,
    round_rows,
)
from tgis.shard.kernels.cpu.codes.tiles.shared_rows import (
    round_rows_for_4_bits,
    round_rows_for_other_bits,
    round_rows_to_8_bits,
)
from tgis.shard.kernels.cpu.codes.tiles.widening import PAIRS_UNIT, QUADS_UNIT, WIDE_ROW
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    inlined,
    keep_alive,
    next_unit,
    operands,
    ordered,
)

_PAGE = 4096
_MAX_PANELS = 8  # maximum panels of a unit of work
_CHUNK = 5 << 17  # bytes of rows of x that stay in a core's cache
_U8, _I8 = np.uint8(0), np.int8(0)
_2_BITS, _3_BITS, _5_BITS, _6_BITS = np.float32(0), np.float64(0), np.uint64(0), np.complex64(0)
_U16, _I16 = np.uint16(0), np.int16(0)
_2_BITS_ROUNDED, _3_BITS_ROUNDED, _5_BITS_ROUNDED = np.bool_(0), np.int32(0), np.int64(0)
_6_BITS_ROUNDED = np.complex128(0)
_MIN_ROUNDED_ROWS = 32  # fewer rows of products with rounded activations take less time without tiles


@ordered
def _skip_rows(rows: Any, row_bytes: int, count: int) -> Any:
    after = 4 * count
    places = (rows.rows + count * row_bytes, rows.sums + after, rows.scales + after)
    return RoundedRows(*places, rows.piece_bytes)


@inlined
def _multiply(args: Any, bits: int, wide_unit: int, element: Any) -> None:
    """Compute a product. Units are ordered by groups of rows, so that a core's cache holds the rows.
    `rounded` is the address of rounded rows, or 0: then each thread rounds the rows of a group."""
    m, width, threads, x, y, pitch = operands(args, 1, 6)
    is_few = m <= FEW_ROWS
    (units,), (rounded,) = operands(args, 10, 1), operands(args, 22, 1)
    w = read_matrix(args, 7, bits, count_row_bytes(units, is_few, wide_unit), wide_unit, TILE_ROWS)
    pieces, num_panels = count_pieces(w), -(-w.out_features // COLUMNS)
    max_rows = max(1, _CHUNK // (pieces * w.row_bytes * TILE_ROWS)) * TILE_ROWS
    num_tiles = -(-m // TILE_ROWS)
    groups = -(-m // max_rows)
    max_rows = -(-num_tiles // groups) * TILE_ROWS
    unit_panels = max(1, min(_MAX_PANELS, num_panels * groups // (8 * threads)))
    group_units = -(-num_panels // unit_panels)
    sums_bytes = max_rows * WIDE_ROW
    copy_bytes = 0 if rounded else pieces * place_rows(w, max_rows, 0, is_few).piece_bytes
    before = SCRATCH_BYTES + sums_bytes + MEMORY_BYTES
    memory = np.empty(_PAGE + before + FLOAT_ROW + copy_bytes, np.uint8)
    at: Any = (np.int64(memory.ctypes.data) + _PAGE - 1) // _PAGE * _PAGE
    scratch, float_row = place_scratch(at, at + SCRATCH_BYTES + sums_bytes), at + before
    if not is_few:
        clear_scratch(scratch, w.units % count_step_units(w) or w.in_features % w.columns)
    all_rows = place_rows(w, m, rounded, is_few)
    rows_of_x, copied_group, configured = all_rows, -1, 0
    unit = next_unit(args)
    while unit < groups * group_units:
        next_one = unit + threads  # if all threads are equally fast
        group, begin = unit // group_units, unit % group_units * unit_panels
        first = group * num_tiles // groups * TILE_ROWS
        rows = min(m, (group + 1) * num_tiles // groups * TILE_ROWS) - first
        if copied_group != group:
            if rounded:
                rows_of_x = _skip_rows(all_rows, w.row_bytes, first)
            else:
                rows_of_x = place_rows(w, rows, float_row + FLOAT_ROW, is_few)
                source = x + 4 * first * width
                round_rows(w, source, width, 0, rows, float_row, rows_of_x, is_few, element)
            copied_group = group
        end = min(begin + unit_panels, num_panels)
        for panel in range(begin, end):
            following = panel + 1 if panel + 1 < end else next_one % group_units * unit_panels
            given = (w, rows_of_x, rows, panel, following, y + 4 * first * pitch, pitch, scratch)
            if is_few:
                multiply_panel_by_few(*given, element)
            else:
                configured = multiply_panel(*given, configured, element)
        unit = next_unit(args)
    if configured > 0:
        release(scratch.tiles)
    keep_alive(memory)


def _multiply_4_bits_on_tiles(args: Any) -> None:
    _multiply(args, 4, PAIRS_UNIT, _U8)


def _multiply_8_bits_on_tiles(args: Any) -> None:
    _multiply(args, 8, PAIRS_UNIT, _I8)


def _multiply_2_bits_on_tiles(args: Any) -> None:
    _multiply(args, 2, PAIRS_UNIT, _2_BITS)


def _multiply_3_bits_on_tiles(args: Any) -> None:
    _multiply(args, 3, PAIRS_UNIT, _3_BITS)


def _multiply_5_bits_on_tiles(args: Any) -> None:
    _multiply(args, 5, PAIRS_UNIT, _5_BITS)


def _multiply_6_bits_on_tiles(args: Any) -> None:
    _multiply(args, 6, PAIRS_UNIT, _6_BITS)


def _multiply_4_bits_rounded_on_tiles(args: Any) -> None:
    _multiply(args, 4, QUADS_UNIT, _U16)


def _multiply_8_bits_rounded_on_tiles(args: Any) -> None:
    _multiply(args, 8, QUADS_UNIT, _I16)


def _multiply_2_bits_rounded_on_tiles(args: Any) -> None:
    _multiply(args, 2, QUADS_UNIT, _2_BITS_ROUNDED)


def _multiply_3_bits_rounded_on_tiles(args: Any) -> None:
    _multiply(args, 3, QUADS_UNIT, _3_BITS_ROUNDED)


def _multiply_5_bits_rounded_on_tiles(args: Any) -> None:
    _multiply(args, 5, QUADS_UNIT, _5_BITS_ROUNDED)


def _multiply_6_bits_rounded_on_tiles(args: Any) -> None:
    _multiply(args, 6, QUADS_UNIT, _6_BITS_ROUNDED)


KERNELS_ON_TILES: dict[Kind, CodeTileKernels] = {}
"""Kernels by the kind of products; empty if the processor has no AMX."""
if instructions.INSTRUCTIONS is not None:
    KERNELS_ON_TILES |= {
        Kind(2, False): CodeTileKernels(Kernel(_multiply_2_bits_on_tiles), round_rows_for_other_bits),
        Kind(3, False): CodeTileKernels(Kernel(_multiply_3_bits_on_tiles), round_rows_for_other_bits),
        Kind(4, False): CodeTileKernels(Kernel(_multiply_4_bits_on_tiles), round_rows_for_4_bits),
        Kind(5, False): CodeTileKernels(Kernel(_multiply_5_bits_on_tiles), round_rows_for_other_bits),
        Kind(6, False): CodeTileKernels(Kernel(_multiply_6_bits_on_tiles), round_rows_for_other_bits),
        Kind(8, False): CodeTileKernels(Kernel(_multiply_8_bits_on_tiles), round_rows_for_other_bits),
    }
if instructions.INSTRUCTIONS is not None and CAN_ROUND:
    KERNELS_ON_TILES |= {
        Kind(bits, True): CodeTileKernels(Kernel(multiply), round_rows_to_8_bits, 1, _MIN_ROUNDED_ROWS)
        for bits, multiply in (
            (2, _multiply_2_bits_rounded_on_tiles),
            (3, _multiply_3_bits_rounded_on_tiles),
            (4, _multiply_4_bits_rounded_on_tiles),
            (5, _multiply_5_bits_rounded_on_tiles),
            (6, _multiply_6_bits_rounded_on_tiles),
            (8, _multiply_8_bits_rounded_on_tiles),
        )
    }
