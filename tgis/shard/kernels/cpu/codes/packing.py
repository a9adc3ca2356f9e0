"""Compiled kernel that packs codes into panels."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.codes.layout import AFTER, COLUMNS, PACKED_BITS, UNIT, UNIT_BIT
from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, operands, ordered, pointer

_U8, _I32 = np.uint8(0), np.int32(0)


@ordered
def _pack_words(codes: int, units: int, to: int, bits: int) -> None:
    """Pack codes of a column of a piece, bytes padded to whole units, as words at an address."""
    words = bits * UNIT // 32
    values = carray(pointer(codes, _U8), (units, UNIT))
    stored = carray(pointer(to, _I32), (units * words, COLUMNS))
    for u in range(units):
        for i in range(words):
            word = np.int64(0)
            for k in range(4):
                if bits == 4:
                    word |= np.int64(values[u, k] & 15 | (values[u, k + 4] & 15) << 4) << (8 * k)
                else:
                    word |= np.int64(values[u, 4 * i + k]) << (8 * k)
            stored[u * words + i, 0] = np.int32(word)


@ordered
def _pack_bytes(codes: int, units: int, to: int) -> None:
    """Pack codes of a column of a piece as bytes at an address."""
    values = carray(pointer(codes, _U8), (units * UNIT,))
    stored = carray(pointer(to, _U8), (units * UNIT, COLUMNS))
    for i in range(units * UNIT):
        stored[i, 0] = values[i]


@ordered
def _pack_halves(codes: int, units: int, to: int) -> None:
    """Pack codes of a column of a piece as bytes of two codes at an address."""
    values = carray(pointer(codes, _U8), (units, 2, 4))
    stored = carray(pointer(to, _U8), (units, UNIT * COLUMNS // 2))
    for u in range(units):
        for i in range(2):
            for k in range(2):
                both = values[u, i, k] & 15 | (values[u, i, k + 2] & 15) << 4
                stored[u, COLUMNS * i + AFTER * k] = both


@ordered
def _pack_parts(codes: int, units: int, to: int, bits: int, column: int) -> None:
    """Pack codes of a column of a piece, bytes padded to whole units, as parts of strips at an address."""
    values = carray(pointer(codes, _U8), (units, UNIT))
    half = COLUMNS // 2
    strip = column // half
    mask = (1 << bits) - 1
    for u in range(units):
        begin = to + (u * UNIT_BIT + strip * UNIT_BIT // 2) * bits
        first = 0
        taken = 0
        for size in (4, 2, 1):
            if bits & size:
                count = 8 * size // bits
                word = np.int64(0)
                for k in range(count):
                    word |= np.int64(values[u, first + k] & mask) << (bits * k)
                rest = 8 * size - bits * count
                last = np.int64(values[u, UNIT - 1] & mask) >> taken
                word |= (last & ((1 << rest) - 1)) << (bits * count)
                stored = carray(pointer(begin + (column % half) * size, _U8), (size,))
                for i in range(size):
                    stored[i] = word >> (8 * i) & 255
                begin = begin + half * size
                first = first + count
                taken = taken + rest


def _pack_codes(args: Any) -> None:
    """Pack rows of codes, uint8 [rows, all units of pieces], and scales and offsets, uint8 [rows, pieces,
    planes, size], as columns of panels, beginning with column `first`. places: offsets of columns, int32
    [COLUMNS], if bytes hold two codes, otherwise 0. A thread packs whole panels, piece by piece: threads that
    write columns of one panel would share its cache lines."""
    num_rows, first, codes, scales, panels, bits, has_words = operands(args, 1, 7)
    places, units, last_units, pieces, planes, size = operands(args, 8, 6)
    width = (pieces - 1) * units + last_units
    scale_bytes = COLUMNS * planes * size
    panel_bytes = width * UNIT_BIT * bits + pieces * scale_bytes
    panel = first // COLUMNS + next_unit(args)
    while panel * COLUMNS < first + num_rows:
        begin_row = max(first, panel * COLUMNS) - first
        end_row = min(first + num_rows, (panel + 1) * COLUMNS) - first
        for piece in range(pieces):
            count = units if piece + 1 < pieces else last_units
            begin = panels + panel * panel_bytes + piece * (units * UNIT_BIT * bits + scale_bytes)
            to = begin + scale_bytes
            for row in range(begin_row, end_row):
                column = (first + row) % COLUMNS
                source = codes + (row * width + piece * units) * UNIT
                if bits in PACKED_BITS:
                    _pack_parts(source, count, to, bits, column)
                elif places:
                    _pack_halves(source, count, to + carray(pointer(places, _I32), (COLUMNS,))[column])
                elif has_words:
                    _pack_words(source, count, to + 4 * column, bits)
                else:
                    _pack_bytes(source, count, to + column)
                for plane in range(planes):
                    stored = carray(pointer(begin + (plane * COLUMNS + column) * size, _U8), (size,))
                    given = carray(
                        pointer(scales + ((row * pieces + piece) * planes + plane) * size, _U8), (size,)
                    )
                    for i in range(size):  # `stored[:] = given` compiles the text of an error
                        stored[i] = given[i]
        panel = first // COLUMNS + next_unit(args)


pack_codes = Kernel(_pack_codes)
