"""Compiled kernels of products with codes. A unit of work is several rows and panels. Each thread copies the
rows that it multiplies to the layout for tiles."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.codes.inner_loop import ROWS, STRIDE, add_columns, multiply_tile, prefetch_lines
from tgis.shard.kernels.cpu.codes.integer_sums import (
    BYTES_STRIDE,
    CAN_ROUND,
    CORRECTION,
    EXCESS,
    PAIRS_STRIDE,
    ROW_SUM,
    SCALE,
    VALUES,
    find_wide_bits,
)
from tgis.shard.kernels.cpu.codes.layout import (
    COLUMNS,
    LOOKS_UP_BYTES,
    PACKED_BITS,
    PIECE,
    PLANE,
    UNIT,
    UNIT_BIT,
    Kind,
)
from tgis.shard.kernels.cpu.codes.many_rows import LINE, ROUNDED_ROWS, WIDE_UNIT, multiply_wide_tile, widen
from tgis.shard.kernels.cpu.codes.many_rows import ROWS as WIDE_ROWS
from tgis.shard.kernels.cpu.codes.scales import find_scales
from tgis.shard.kernels.cpu.gemm.inner_loop import copy
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.int8.quantize import make_quantizer
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    inlined,
    keep_alive,
    next_unit,
    operands,
    ordered,
    pointer,
)

_MAX_PANELS = 8  # maximum panels of a unit of work
_WIDE_PIECE = 4 * PIECE * COLUMNS  # bytes of a piece whose codes are widened to float32
_PAGE = 4096  # alignment of scratch memory; affects speed
_CHUNK = 5 << 17  # bytes of a copy of x, which stays in a core's cache
_F32, _I32, _U8, _I8 = np.float32(0), np.int32(0), np.uint8(0), np.int8(0)
_U16, _I16, _U32 = np.uint16(0), np.int16(0), np.uint32(0)
_2_BITS, _3_BITS, _5_BITS, _6_BITS = np.float32(0), np.float64(0), np.uint64(0), np.complex64(0)
_2_BITS_ROUNDED, _3_BITS_ROUNDED, _5_BITS_ROUNDED = np.bool_(0), np.int32(0), np.int64(0)
_6_BITS_ROUNDED = np.complex128(0)

_WIDE_BITS = tuple(find_wide_bits(bits) for bits in range(9))  # by the bits of codes

_quantize_group = make_quantizer(1)


class Matrix(NamedTuple):
    """Weight in the layout of `layout.py`: sizes and addresses."""

    out_features: int
    in_features: int
    columns: int  # columns of x per piece, except the last
    units: int  # units per piece, except the last
    scale_form: int
    scale_bytes: int  # bytes of a piece's scales and offsets
    centre: (
        int  # subtracted from codes before multiplication: half their range if there are offsets, otherwise 0
    )
    has_offsets: int
    pieces_per_factor: int
    first_piece: int  # index of the first piece among the pieces that share its factors
    panels: int
    factors: int  # float32 [panels, factors, 1 or 2, COLUMNS], or 0
    zeros: int  # int8 [panels, pieces, COLUMNS], or 0
    table: int
    order: int  # int32: columns of x in the order of the codes (-1: zeros), or 0
    unit_bytes: int
    code_bits: int
    row_bytes: int  # bytes of a row of a piece of x
    wide_unit: int  # bytes of a unit of widened codes; 0: tiles convert codes
    tile_rows: int  # maximum rows of a tile


@ordered
def count_pieces(w: Any) -> Any:
    return -(-w.in_features // w.columns)


@ordered
def count_units(w: Any, piece: int) -> Any:
    return -(-min(w.columns, w.in_features - piece * w.columns) // UNIT)


@ordered
def panel_bytes(w: Any) -> Any:
    pieces = count_pieces(w)
    units = (pieces - 1) * w.units + count_units(w, pieces - 1)
    return units * w.unit_bytes + pieces * w.scale_bytes


@ordered
def copy_row(w: Any, x: int, piece: int, to: int) -> None:
    """Copy a piece of a row of x, zero-padded, and write its sum."""
    first = piece * w.columns
    units = count_units(w, piece)
    count = min(w.columns, w.in_features - first)
    row = carray(pointer(to, _F32), (PIECE,))
    if w.order:
        order = carray(pointer(w.order + 4 * first, _I32), (count,))
        source = carray(pointer(x, _F32), (1,))
        for i in range(count):
            row[i] = source[order[i]] if order[i] >= 0 else np.float32(0)
    else:
        copy(to, x + 4 * first, 4 * count)
    for i in range(count, units * UNIT):
        row[i] = np.float32(0)
    if w.zeros or w.has_offsets:
        add_columns(to, units)


@ordered
def _copy_rows(w: Any, x: int, width: int, rows: int, to: int) -> None:
    """Copy rows of x, `width` columns each, to [pieces, rows, STRIDE]."""
    for piece in range(count_pieces(w)):
        for r in range(rows):
            copy_row(w, x + 4 * r * width, piece, to + (piece * rows + r) * STRIDE)


@ordered
def _round_rows(w: Any, x: int, width: int, rows: int, to: int) -> None:
    """Round rows of x to 8 bits, or to 16 if w.row_bytes is PAIRS_STRIDE: [pieces, rows, w.row_bytes]."""
    scratch = np.empty(STRIDE + BYTES_STRIDE, np.uint8)
    row: Any = np.int64(scratch.ctypes.data)
    for piece in range(count_pieces(w)):
        size = count_units(w, piece) * UNIT
        for r in range(rows):
            at = to + (piece * rows + r) * w.row_bytes
            rounded = row + STRIDE if w.row_bytes == PAIRS_STRIDE else at
            copy_row(w, x + 4 * r * width, piece, row)
            _quantize_group(row, size, size, rounded + SCALE)
            if w.row_bytes == PAIRS_STRIDE:
                _widen_row(rounded, size, at)
            _describe_row(at, w.code_bits)
    keep_alive(scratch)


@ordered
def _widen_row(x: int, size: int, to: int) -> None:
    """Convert a piece of a row of `size` 8-bit integers to 16 bits."""
    source = carray(pointer(x, _I8), (BYTES_STRIDE,))
    carray(pointer(to, _I8), (VALUES,))[:] = source[:VALUES]
    carray(pointer(to + VALUES, _I16), (size,))[:] = source[VALUES : VALUES + size]


@ordered
def _describe_row(at: int, code_bits: int) -> None:
    """Write the row sum and the excess of a piece of a rounded row."""
    correction = carray(pointer(at + CORRECTION, _I32), (1,))[0]
    scale = carray(pointer(at + SCALE, _F32), (1,))[0]
    exact = np.float32(correction) * np.float32(-1 / 128)
    carray(pointer(at + ROW_SUM, _F32), (1,))[0] = exact * scale
    carray(pointer(at + EXCESS, _I32), (1,))[0] = correction >> (8 - code_bits)


@ordered
def find_zeros(w: Any, panel: int, piece: int) -> Any:
    return w.zeros + (panel * count_pieces(w) + piece) * COLUMNS if w.zeros else np.int64(0)


@inlined
def find_ahead(w: Any, at: int, piece: int, pieces: int, following: int) -> Any:
    """Return the address to prefetch while the piece at an address is multiplied. The thread's next panel is
    `following`."""
    piece_bytes = w.units * w.unit_bytes + w.scale_bytes
    distance = PIECE // w.columns  # in pieces; small pieces take less time than a memory access
    later = piece + distance
    if later < pieces:
        return at + distance * piece_bytes
    return w.panels + following * panel_bytes(w) + (later - pieces) * piece_bytes


@inlined
def _multiply_panel(
    w: Any, x: int, rows: int, panel: int, following: int, sums: int, wide: int, element: Any
) -> None:
    """Compute sums[rows, COLUMNS] = x @ a panel. The thread's next panel is `following`. `wide` is the
    address source scratch memory for a piece's widened codes; memory for its scales and offsets precedes
    it."""
    carray(pointer(sums, _F32), (rows * COLUMNS,))[:] = np.float32(0)
    at = w.panels + panel * panel_bytes(w)
    pieces = count_pieces(w)
    for piece in range(pieces):
        units = count_units(w, piece)
        source = x + piece * rows * w.row_bytes
        ahead = find_ahead(w, at, piece, pieces, following)
        scales = find_scales(w, panel, piece, at, wide - 2 * PLANE, w.centre)
        codes = at + w.scale_bytes
        offsets = (scales + PLANE) * w.has_offsets
        if w.wide_unit:
            _multiply_piece(w, source, rows, panel, piece, codes, scales, offsets, ahead, sums, wide, element)
        else:
            prefetch_lines(ahead + units * w.unit_bytes, w.scale_bytes)
            _multiply_codes(w, source, rows, panel, piece, codes, scales, offsets, ahead, sums, element)
        at += units * w.unit_bytes + w.scale_bytes


@ordered
def _multiply_codes(
    w: Any,
    x: int,
    rows: int,
    panel: int,
    piece: int,
    at: int,
    scales: int,
    offsets: int,
    ahead: int,
    sums: int,
    element: Any,
) -> None:
    """Add the product source rows and the codes at an address to sums. Each tile converts the codes."""
    units = count_units(w, piece)
    zeros = find_zeros(w, panel, piece)
    num_tiles = -(-rows // ROWS)
    for tile in range(num_tiles):
        first = tile * rows // num_tiles
        tall = (tile + 1) * rows // num_tiles - first
        to = sums + 4 * COLUMNS * first
        source = x + first * w.row_bytes
        multiply_tile(tall, to, source, at, w.table, scales, offsets, zeros, units, ahead, element)


@ordered
def _multiply_piece(
    w: Any,
    x: int,
    rows: int,
    panel: int,
    piece: int,
    at: int,
    scales: int,
    offsets: int,
    ahead: int,
    sums: int,
    wide: int,
    element: Any,
) -> None:
    """Add the product source rows and the codes at an address to sums. The codes are widened once."""
    units = count_units(w, piece)
    zeros = find_zeros(w, panel, piece)
    codes = at
    if w.unit_bytes < w.wide_unit:
        widen(wide, at, units, w.table, element)
        codes = wide
    num_tiles = -(-rows // w.tile_rows)
    lines = -(-(units * w.unit_bytes + w.scale_bytes) // (LINE * units * num_tiles))
    for tile in range(num_tiles):
        first = tile * rows // num_tiles
        tall = (tile + 1) * rows // num_tiles - first
        to = sums + 4 * COLUMNS * first
        source = x + first * w.row_bytes
        multiply_wide_tile(tall, to, source, codes, scales, offsets, zeros, units, ahead, lines, element)
        ahead += units * lines * LINE


@ordered
def copy_sums(sums: int, rows: int, y: int, pitch: int, n: int, panel: int) -> None:
    """Copy sums[rows, COLUMNS] to a panel's columns of y, [rows, n]. Rows of y are `pitch` numbers apart."""
    first = panel * COLUMNS
    for r in range(rows):
        copy(y + 4 * (r * pitch + first), sums + 4 * COLUMNS * r, 4 * min(COLUMNS, n - first))


@ordered
def read_matrix(args: Any, first: int, bits: int, row_bytes: int, wide_unit: int, tile_rows: int) -> Any:
    """Return the matrix that a kernel's arguments, beginning with `first`, describe."""
    layout = (UNIT_BIT * bits, bits, row_bytes, wide_unit, tile_rows)
    return Matrix(*(operands(args, first, 15) + layout))


@inlined
def _multiply_float(args: Any, bits: int, element: Any) -> None:
    """Compute a product with float32 activations."""
    (m,) = operands(args, 1, 1)
    # With AVX2, converting 4-bit codes for two tiles, or 8-bit codes for four, takes as long as widening them
    # once.
    max_unwidened = ROWS if LANES == 16 or bits in PACKED_BITS else ROWS * bits // 2
    wide_unit = 4 * WIDE_UNIT if m > max_unwidened else 0
    _multiply(args, read_matrix(args, 7, bits, STRIDE, wide_unit, WIDE_ROWS), element)


@inlined
def _multiply_rounded(args: Any, bits: int, wide_bits: int, element: Any) -> None:
    """Compute a product with rounded activations. Packed codes are always widened."""
    (m,) = operands(args, 1, 1)
    max_unwidened = ROWS if LANES == 16 else ROWS * bits // 2
    is_wide = bits in PACKED_BITS or m > max_unwidened
    wide_unit = WIDE_UNIT // 8 * wide_bits if is_wide else 0
    row_bytes = PAIRS_STRIDE if is_wide and wide_bits == 16 else BYTES_STRIDE
    _multiply(args, read_matrix(args, 7, bits, row_bytes, wide_unit, ROUNDED_ROWS), element)


@inlined
def _multiply(args: Any, w: Any, element: Any) -> None:
    """Compute a product. Units are ordered by groups of rows, so that threads can reuse copies of x."""
    m, width, threads, x, y, pitch = operands(args, 1, 6)
    row_bytes = count_pieces(w) * w.row_bytes
    num_panels = -(-w.out_features // COLUMNS)
    max_rows = max(1, _CHUNK // (row_bytes * w.tile_rows)) * w.tile_rows
    groups = -(-m // max_rows)
    max_rows = -(-m // groups)
    unit_panels = max(1, min(_MAX_PANELS, num_panels * groups // (8 * threads)))
    group_units = -(-num_panels // unit_panels)
    scratch = np.empty(2 * _PAGE + _WIDE_PIECE + max_rows * (4 * COLUMNS + row_bytes), np.uint8)
    wide: Any = (np.int64(scratch.ctypes.data) + 2 * _PAGE - 1) // _PAGE * _PAGE
    sums: Any = wide + _WIDE_PIECE
    rows_of_x: Any = sums + max_rows * 4 * COLUMNS
    copied_group = -1
    unit = next_unit(args)
    while unit < groups * group_units:
        next_one = unit + threads  # if all threads are equally fast
        group = unit // group_units
        begin = unit % group_units * unit_panels
        first = group * m // groups
        rows = (group + 1) * m // groups - first
        if copied_group != group:
            # Passing one of these functions as an argument would prevent caching of the compiled code.
            if w.row_bytes == STRIDE:
                _copy_rows(w, x + 4 * first * width, width, rows, rows_of_x)
            else:
                _round_rows(w, x + 4 * first * width, width, rows, rows_of_x)
            copied_group = group
        end = min(begin + unit_panels, num_panels)
        for panel in range(begin, end):
            following = panel + 1 if panel + 1 < end else next_one % group_units * unit_panels
            _multiply_panel(w, rows_of_x, rows, panel, following, sums, wide, element)
            copy_sums(sums, rows, y + 4 * first * pitch, pitch, w.out_features, panel)
        unit = next_unit(args)
    keep_alive(scratch)


def _multiply_4_bits(args: Any) -> None:
    _multiply_float(args, 4, _U8)


def _multiply_4_bits_of_any_numbers(args: Any) -> None:
    _multiply_float(args, 4, _U32)


def _multiply_8_bits(args: Any) -> None:
    _multiply_float(args, 8, _I8)


def _multiply_2_bits(args: Any) -> None:
    _multiply_float(args, 2, _2_BITS)


def _multiply_3_bits(args: Any) -> None:
    _multiply_float(args, 3, _3_BITS)


def _multiply_5_bits(args: Any) -> None:
    _multiply_float(args, 5, _5_BITS)


def _multiply_6_bits(args: Any) -> None:
    _multiply_float(args, 6, _6_BITS)


def _multiply_2_bits_rounded(args: Any) -> None:
    _multiply_rounded(args, 2, _WIDE_BITS[2], _2_BITS_ROUNDED)


def _multiply_3_bits_rounded(args: Any) -> None:
    _multiply_rounded(args, 3, _WIDE_BITS[3], _3_BITS_ROUNDED)


def _multiply_4_bits_rounded(args: Any) -> None:
    _multiply_rounded(args, 4, _WIDE_BITS[4], _U16)


def _multiply_5_bits_rounded(args: Any) -> None:
    _multiply_rounded(args, 5, _WIDE_BITS[5], _5_BITS_ROUNDED)


def _multiply_6_bits_rounded(args: Any) -> None:
    _multiply_rounded(args, 6, _WIDE_BITS[6], _6_BITS_ROUNDED)


def _multiply_8_bits_rounded(args: Any) -> None:
    _multiply_rounded(args, 8, _WIDE_BITS[8], _I16)


MULTIPLY = {
    Kind(2, False): Kernel(_multiply_2_bits),
    Kind(3, False): Kernel(_multiply_3_bits),
    Kind(4, False): Kernel(_multiply_4_bits),
    Kind(5, False): Kernel(_multiply_5_bits),
    Kind(6, False): Kernel(_multiply_6_bits),
    Kind(8, False): Kernel(_multiply_8_bits),
}
if LOOKS_UP_BYTES:
    MULTIPLY[Kind(4, False, has_any_numbers=True)] = Kernel(_multiply_4_bits_of_any_numbers)
if CAN_ROUND:
    MULTIPLY[Kind(2, True)] = Kernel(_multiply_2_bits_rounded)
    MULTIPLY[Kind(3, True)] = Kernel(_multiply_3_bits_rounded)
    MULTIPLY[Kind(4, True)] = Kernel(_multiply_4_bits_rounded)
    MULTIPLY[Kind(5, True)] = Kernel(_multiply_5_bits_rounded)
    MULTIPLY[Kind(6, True)] = Kernel(_multiply_6_bits_rounded)
    MULTIPLY[Kind(8, True)] = Kernel(_multiply_8_bits_rounded)
