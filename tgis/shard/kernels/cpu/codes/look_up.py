"""Compiled kernel that looks up rows of a table of codes, which are columns of panels, and dequantizes
them."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.codes.kernels import count_pieces, count_units, panel_bytes, read_matrix
from tgis.shard.kernels.cpu.codes.layout import AFTER, COLUMNS, PACKED_BITS, PLANE, UNIT, UNIT_BIT
from tgis.shard.kernels.cpu.codes.scales import find_scales
from tgis.shard.kernels.cpu.jit.compiler import Kernel, keep_alive, next_unit, operands, ordered, pointer

_F32, _U8, _I32, _I64 = np.float32(0), np.uint8(0), np.int32(0), np.int64(0)


@ordered
def _read_byte(address: int) -> Any:
    return np.int64(carray(pointer(address, _U8), (1,))[0])


@ordered
def _read_part(unit: int, bits: int, column: int, k: int) -> Any:
    """Return code k of a column of a unit of packed codes."""
    half = COLUMNS // 2
    code = np.int64(0)
    first = 0
    taken = 0
    part = unit + column // half * (UNIT_BIT * bits // 2)
    for size in (4, 2, 1):
        if bits & size:
            word = np.int64(0)
            for i in range(size):
                word |= _read_byte(part + column % half * size + i) << (8 * i)
            count = 8 * size // bits
            rest = 8 * size - count * bits
            if first <= k < first + count:
                return word >> (bits * (k - first)) & ((1 << bits) - 1)
            code |= word >> (bits * count) << taken
            part += half * size
            first += count
            taken += rest
    return code


@ordered
def _read_code(unit: int, bits: int, has_words: int, places: int, column: int, k: int) -> Any:
    if bits in PACKED_BITS:
        return _read_part(unit, bits, column, k)
    if places:
        place = carray(pointer(places, _I32), (COLUMNS,))[column]
        return _read_byte(unit + place + COLUMNS * (k // 4) + AFTER * (k % 2)) >> (4 * (k % 4 // 2)) & 15
    if not has_words:
        return _read_byte(unit + COLUMNS * k + column)
    if bits == 4:
        return _read_byte(unit + 4 * column + k % 4) >> (4 * (k // 4)) & 15
    return _read_byte(unit + 4 * (k // 4 * COLUMNS + column) + k % 4)


def _look_up(args: Any) -> None:
    """Write rows of a table. numbers: values of the codes, float32 [2^bits]."""
    num_rows, ids, out, bits, has_words, places, numbers_at = operands(args, 1, 7)
    w = read_matrix(args, 8, bits, 0, 0, 1)
    numbers = carray(pointer(numbers_at, _F32), (1 << bits,))
    scratch = np.empty(2 * PLANE, np.uint8)
    t = next_unit(args)
    while t < num_rows:
        row = carray(pointer(ids + 8 * t, _I64), (1,))[0]
        panel = row // COLUMNS
        column = row % COLUMNS
        size = w.in_features
        at = w.panels + panel * panel_bytes(w)
        out_row = carray(pointer(out + 4 * t * size, _F32), (size,))
        for piece in range(count_pieces(w)):
            scales = find_scales(w, panel, piece, at, scratch.ctypes.data, 0)
            scale = carray(pointer(scales + 4 * column, _F32), (1,))[0]
            offset = np.float32(0)
            if w.has_offsets:
                offset = carray(pointer(scales + PLANE + 4 * column, _F32), (1,))[0]
            units = count_units(w, piece)
            first = piece * w.columns
            for i in range(min(w.columns, size - first)):
                unit = at + w.scale_bytes + i // UNIT * w.unit_bytes
                code = _read_code(unit, bits, has_words, places, column, i % UNIT)
                out_row[first + i] = numbers[code] * scale + offset
            at += w.scale_bytes + units * w.unit_bytes
        t = next_unit(args)
    keep_alive(scratch)


look_up = Kernel(_look_up)
