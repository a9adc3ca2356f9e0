"""Rows of x for products with codes on AMX tiles, rounded to bfloat16: pairs for tiles, and float32 for few
rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray

from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.kernels import copy_row, count_pieces, count_units
from tgis.shard.kernels.cpu.codes.layout import KINDS, PIECE, UNIT
from tgis.shard.kernels.cpu.codes.tiles.chains import FEW_ROWS
from tgis.shard.kernels.cpu.codes.tiles.pairs import UNIT_PAIRS, find_pair_order
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered, pointer
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I16, I32, I64

STEP_UNITS = TILE_ROWS // UNIT_PAIRS  # units of a tile
_LINE = 64  # bytes of a cache line
FLOAT_ROW = 4 * PIECE + 64  # bytes of a piece in float32 and its sum
_U8, _F32 = np.uint8(0), np.float32(0)


class RoundedRows(NamedTuple):
    """Addresses of a piece of rounded rows and of their sums, float32. Rows of a piece are adjacent."""

    rows: int
    sums: int
    piece_bytes: int  # distance of pieces


@ordered
def count_row_bytes(units: int, is_few: int) -> int:
    """Return the bytes of a piece of a row: float32, or pairs that fill whole tiles."""
    return 4 * UNIT * units if is_few else -(-units // STEP_UNITS) * ROW_BYTES


@ordered
def place_rows(row_bytes: int, rows: int, at: int) -> Any:
    """Return the places of rows that `round_rows` writes to an address. Both rows and sums fill whole
    tiles."""
    padded = rows if rows <= FEW_ROWS else -(-rows // TILE_ROWS) * TILE_ROWS
    return RoundedRows(at, at + padded * row_bytes, padded * (row_bytes + 4))


@llvm_function()
def _round_to_pairs(
    b: Any, x: Any, pieces: Any, units: Any, to: Any, sum_at: Any, stride: Any, element: Any
) -> None:
    """Round adjacent pieces of float32 to pairs, and store the sums of the rounded numbers. Rounded pieces
    are `stride` bytes apart, and so are sums."""
    order = list(find_pair_order(KINDS[element].bits))

    def store_units(place: Any, u: Any, rounded: Any) -> None:
        lanes = rounded.type.count
        halves = b.trunc(b.lshr(rounded, llvm.constant(16, lanes, I32)), ir.VectorType(I16, lanes))
        pairs = llvm.pointer_to(b, halves.type, place, b.mul(u, I64(2 * UNIT)))
        orders = [first + lane for first in range(0, lanes, UNIT) for lane in order]
        b.store(llvm.shuffle(b, halves, halves, orders), pairs, align=2 * UNIT)

    _round_pieces(b, x, pieces, units, to, sum_at, stride, store_units)


@llvm_function()
def _round_to_floats(b: Any, x: Any, pieces: Any, units: Any, to: Any, sum_at: Any, stride: Any) -> None:
    """Round adjacent pieces to bfloat16 in float32. See `_round_to_pairs`."""

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
            floats, [total] = _as_floats(b, rounded), sums
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
    w: Any, x: int, piece: int, row: int, to: int, sum_at: int, is_few: int, element: Any
) -> None:
    """Round a piece of a row of x to pairs, or with `is_few` to float32, and store the sum of the rounded
    numbers. `row` is the address of scratch memory for the piece in float32."""
    units = count_units(w, piece)
    copy_row(w, x, piece, row)
    if is_few:
        _round_to_floats(row, 1, units, to, sum_at, 0)
    else:
        _round_to_pairs(row, 1, units, to, sum_at, 0, element)
        padding = w.row_bytes - 2 * UNIT * units
        if padding:
            carray(pointer(to + 2 * UNIT * units, _U8), (padding,))[:] = 0


@ordered
def round_rows(
    w: Any, x: int, width: int, begin: int, end: int, row: int, to: Any, is_few: int, element: Any
) -> None:
    """Round rows `begin` to `end` of x, `width` columns each, and clear the sums of following rows of the
    same tile. `row` is the address of FLOAT_ROW bytes."""
    pieces = count_pieces(w)
    is_whole = not w.order and w.in_features == pieces * w.units * UNIT
    has_padding = not is_few and w.row_bytes > 2 * UNIT * w.units
    for r in range(begin, end):
        source, place, sum_at = x + 4 * r * width, to.rows + r * w.row_bytes, to.sums + 4 * r
        if not is_whole or has_padding:
            for piece in range(pieces):
                after = piece * to.piece_bytes
                _round_piece(w, source, piece, row, place + after, sum_at + after, is_few, element)
        elif is_few:
            _round_to_floats(source, pieces, w.units, place, sum_at, to.piece_bytes)
        else:
            _round_to_pairs(source, pieces, w.units, place, sum_at, to.piece_bytes, element)
    padded = end if is_few else -(-end // TILE_ROWS) * TILE_ROWS
    for piece in range(pieces):
        carray(pointer(to.sums + 4 * end + piece * to.piece_bytes, _F32), (padded - end,))[:] = 0
