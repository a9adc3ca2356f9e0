"""Rows of x for products with codes on AMX tiles. With bfloat16 arithmetic, they are rounded to pairs for
tiles, and to float32 for few rows. Otherwise, each piece of a row is rounded to 8 bits and has a scale."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray

from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.kernels import copy_row, count_pieces, count_units
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, PIECE, UNIT, Kind
from tgis.shard.kernels.cpu.codes.tiles.widening import (
    QUADS_UNIT,
    WIDE_ROW,
    find_pair_order,
)
from tgis.shard.kernels.cpu.int8.quantize import (
    OFFSET,
    Masks,
    choose_masks,
    round_group,
    store_group,
)
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered, pointer
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I16, I32, I64

_LINE = 64  # bytes of a cache line
FLOAT_ROW = 4 * PIECE + 64  # bytes of a piece in float32 and its sum
_U8, _F32 = np.uint8(0), np.float32(0)


class RoundedRows(NamedTuple):
    """Addresses of a piece of rounded rows and of their sums and scales, float32. Rows of a piece are
    adjacent. Rows of pairs have no scales."""

    rows: int
    sums: int
    scales: int
    piece_bytes: int  # distance of pieces


@ordered
def count_step_units(w: Any) -> Any:
    """Return the units of a tile."""
    return TILE_ROWS * WIDE_ROW // w.wide_unit


@ordered
def count_row_bytes(units: int, is_few: int, wide_unit: int) -> int:
    """Return the bytes of a piece of a row: float32, or pairs or quads of part of a tile or whole tiles."""
    if is_few:
        return 4 * UNIT * units
    row_bytes = units * wide_unit // COLUMNS
    return row_bytes if row_bytes < ROW_BYTES else -(-row_bytes // ROW_BYTES) * ROW_BYTES


@ordered
def place_rows(w: Any, rows: int, at: int, is_few: int) -> Any:
    """Return the places of rows that `round_rows` writes to an address. Without `is_few`, rows, sums and
    scales fill whole tiles."""
    padded = rows if is_few else -(-rows // TILE_ROWS) * TILE_ROWS
    sums = at + padded * w.row_bytes
    scales = sums + 4 * padded * (w.wide_unit == QUADS_UNIT)
    return RoundedRows(at, sums, scales, scales + 4 * padded - at)


@llvm_function()
def _round_for_tiles(
    b: Any,
    x: Any,
    pieces: Any,
    units: Any,
    to: Any,
    sum_at: Any,
    scale_at: Any,
    stride: Any,
    has_offsets: Any,
    element: Any,
) -> None:
    """Round adjacent pieces of float32 to pairs or quads, and store the sums of the rounded numbers, and the
    scales of quads. Sums of quads include the scale if `has_offsets`. Rounded pieces are `stride` bytes
    apart, and so are sums and scales."""
    kind = KINDS[element]
    if kind.rounds_activations:
        _round_to_quads(b, x, pieces, units, to, sum_at, scale_at, stride, has_offsets)
    else:
        _round_to_pairs(b, x, pieces, units, to, sum_at, stride, kind)


def _round_to_quads(
    b: Any,
    x: Any,
    pieces: Any,
    units: Any,
    to: Any,
    sum_at: Any,
    scale_at: Any,
    stride: Any,
    has_offsets: Any,
) -> None:
    """Emit the rounding of pieces to 8 bits."""
    size = b.mul(units, I64(UNIT))
    includes_scale = b.icmp_signed("!=", has_offsets, I64(0))

    def round_piece(piece: Any, _: list[Any]) -> list[Any]:
        begin = b.add(x, b.mul(piece, b.mul(size, I64(4))))
        after = b.mul(piece, stride)

        def build(masks: Masks) -> None:
            group = round_group(b, begin, masks)
            store_group(b, group, b.add(to, after), masks, 1)
            total = b.fmul(b.sitofp(group.correction, FLOAT), FLOAT(-1 / OFFSET))
            total = b.select(includes_scale, b.fmul(total, group.scale), total)
            for number, place in ((total, sum_at), (group.scale, scale_at)):
                b.store(number, llvm.pointer_to(b, FLOAT, place, after), align=4)

        choose_masks(b, size, size, build)
        return []

    llvm.loop(b, pieces, [], round_piece, unrolls=False)


def _round_to_pairs(
    b: Any, x: Any, pieces: Any, units: Any, to: Any, sum_at: Any, stride: Any, kind: Kind
) -> None:
    """Emit the rounding of pieces to bfloat16."""
    order = list(find_pair_order(kind.bits))

    def store_units(place: Any, u: Any, rounded: Any) -> None:
        lanes = rounded.type.count
        halves = b.trunc(b.lshr(rounded, llvm.constant(16, lanes, I32)), ir.VectorType(I16, lanes))
        pairs = llvm.pointer_to(b, halves.type, place, b.mul(u, I64(2 * UNIT)))
        orders = [first + lane for first in range(0, lanes, UNIT) for lane in order]
        b.store(llvm.shuffle(b, halves, halves, orders), pairs, align=2 * UNIT)

    _round_pieces(b, x, pieces, units, to, sum_at, stride, store_units)


@llvm_function()
def _round_to_floats(b: Any, x: Any, pieces: Any, units: Any, to: Any, sum_at: Any, stride: Any) -> None:
    """Round adjacent pieces to bfloat16 in float32. See `_round_for_tiles`."""

    def store_units(place: Any, u: Any, rounded: Any) -> None:
        llvm.store_vector(b, _as_floats(b, rounded), b.add(place, b.mul(u, I64(4 * UNIT))))

    _round_pieces(b, x, pieces, units, to, sum_at, stride, store_units)


def _round_pieces(
    b: Any,
    x: Any,
    pieces: Any,
    units: Any,
    to: Any,
    sum_at: Any,
    stride: Any,
    store_units: Callable[[Any, Any, Any], None],
) -> None:
    """Emit the rounding of pieces. The order of additions to their sums is fixed."""

    def round_piece(piece: Any, _: list[Any]) -> list[Any]:
        begin = b.add(x, b.mul(piece, b.mul(units, I64(4 * UNIT))))
        after = b.mul(piece, stride)
        place = b.add(to, after)

        def round_units(count: int, u: Any, sums: list[Any]) -> list[Any]:
            given = llvm.load_vector(b, b.add(begin, b.mul(u, I64(4 * UNIT))), count * UNIT)
            rounded = _flush(b, llvm.round_to_bfloat16(b, given))
            store_units(place, u, rounded)
            floats = _as_floats(b, rounded)
            [total] = sums
            for first in range(0, count * UNIT, UNIT):
                total = b.fadd(total, llvm.shuffle(b, floats, floats, [*range(first, first + UNIT)]))
            return [total]

        even = b.and_(units, I64(-2))
        sums = [llvm.constant(0.0, UNIT)]
        sums = llvm.loop_range(b, I64(0), even, 2, sums, partial(round_units, 2))
        [total] = llvm.loop_range(b, even, units, 1, sums, partial(round_units, 1))
        for half in (4, 2, 1):
            low = llvm.shuffle(b, total, total, list(range(half)))
            total = b.fadd(low, llvm.shuffle(b, total, total, list(range(half, 2 * half))))
        llvm.store_vector(b, total, b.add(sum_at, after))
        return []

    llvm.loop(b, pieces, [], round_piece)


def _flush(b: Any, bits: Any) -> Any:
    """Emit zeros instead of the floats below 2**-100. Tiles treat numbers and sums below 2**-126 as zeros,
    and other instructions do not; sums of multiples of 2**-107 are never so small."""
    lanes = bits.type.count
    exponents = b.and_(bits, llvm.constant(0x7F800000, lanes, I32))
    is_small = b.icmp_unsigned("<", exponents, llvm.constant((127 - 100) << 23, lanes, I32))
    return b.select(is_small, llvm.constant(0, lanes, I32), bits)


def _as_floats(b: Any, bits: Any) -> Any:
    return b.bitcast(bits, ir.VectorType(FLOAT, bits.type.count))


@ordered
def _round_piece(
    w: Any, x: int, piece: int, row: int, to: int, sum_at: int, scale_at: int, is_few: int, element: Any
) -> None:
    """Round a piece of a row of x for tiles, or with `is_few` to float32, and store the sum of the rounded
    numbers. `row` is the address of scratch memory for the piece in float32."""
    units = count_units(w, piece)
    copy_row(w, x, piece, row)
    if is_few:
        _round_to_floats(row, 1, units, to, sum_at, 0)
    else:
        _round_for_tiles(row, 1, units, to, sum_at, scale_at, 0, w.has_offsets, element)
        size = units * w.wide_unit // COLUMNS
        if w.row_bytes > size:
            carray(pointer(to + size, _U8), (w.row_bytes - size,))[:] = 0


@ordered
def round_rows(
    w: Any, x: int, width: int, begin: int, end: int, row: int, to: Any, is_few: int, element: Any
) -> None:
    """Round rows `begin` to `end` of x, `width` columns each, and clear the sums and scales of following rows
    of the same tile. `row` is the address of FLOAT_ROW bytes."""
    pieces = count_pieces(w)
    is_whole = not w.order and w.in_features == pieces * w.units * UNIT
    has_padding = not is_few and w.row_bytes > w.units * w.wide_unit // COLUMNS
    for r in range(begin, end):
        source = x + 4 * r * width
        place = to.rows + r * w.row_bytes
        sum_at, scale_at = to.sums + 4 * r, to.scales + 4 * r
        if not is_whole or has_padding:
            for piece in range(pieces):
                after = piece * to.piece_bytes
                places = (place + after, sum_at + after, scale_at + after)
                _round_piece(w, source, piece, row, *places, is_few, element)
        elif is_few:
            _round_to_floats(source, pieces, w.units, place, sum_at, to.piece_bytes)
        else:
            given = (place, sum_at, scale_at, to.piece_bytes, w.has_offsets)
            _round_for_tiles(source, pieces, w.units, *given, element)
    padded = end if is_few else -(-end // TILE_ROWS) * TILE_ROWS
    for piece in range(pieces):
        for first in (to.sums, to.scales):
            carray(pointer(first + 4 * end + piece * to.piece_bytes, _F32), (padded - end,))[:] = 0
