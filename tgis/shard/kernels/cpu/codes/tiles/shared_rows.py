"""Kernels that round the rows of x once for all threads of a product with codes on AMX tiles."""

from typing import Any

import numpy as np

from tgis.shard.kernels.cpu.amx.instructions import TILE_ROWS
from tgis.shard.kernels.cpu.codes.kernels import read_matrix
from tgis.shard.kernels.cpu.codes.tiles.rows import FLOAT_ROW, count_row_bytes, place_rows, round_rows
from tgis.shard.kernels.cpu.codes.tiles.widening import PAIRS_UNIT, QUADS_UNIT
from tgis.shard.kernels.cpu.jit.compiler import Kernel, inlined, keep_alive, next_unit, operands

_U8, _I8, _I16 = np.uint8(0), np.int8(0), np.int16(0)


@inlined
def _round(args: Any, bits: int, wide_unit: int, element: Any) -> None:
    """Round rows of x. A unit of work is the rows of a tile."""
    m, width, x, to = operands(args, 1, 4)
    (units,) = operands(args, 8, 1)
    w = read_matrix(args, 5, bits, count_row_bytes(units, 0, wide_unit), wide_unit, TILE_ROWS)
    scratch = np.empty(FLOAT_ROW, np.uint8)
    row: Any = np.int64(scratch.ctypes.data)
    places = place_rows(w, m, to, 0)
    first = next_unit(args) * TILE_ROWS
    while first < m:
        round_rows(w, x, width, first, min(first + TILE_ROWS, m), row, places, 0, element)
        first = next_unit(args) * TILE_ROWS
    keep_alive(scratch)


def _round_rows_for_4_bits(args: Any) -> None:
    _round(args, 4, PAIRS_UNIT, _U8)


def _round_rows_for_other_bits(args: Any) -> None:
    _round(args, 8, PAIRS_UNIT, _I8)


def _round_rows_to_8_bits(args: Any) -> None:
    _round(args, 8, QUADS_UNIT, _I16)


# Pairs of 4-bit codes have an order of their own.
round_rows_for_4_bits, round_rows_for_other_bits = (
    Kernel(_round_rows_for_4_bits),
    Kernel(_round_rows_for_other_bits),
)
round_rows_to_8_bits = Kernel(_round_rows_to_8_bits)
