"""Kernels of products with codes on AMX tiles, and the memory that they need."""

from typing import NamedTuple

from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.layout import UNIT
from tgis.shard.kernels.cpu.jit.compiler import Kernel


class CodeTileKernels(NamedTuple):
    """Kernels of products with codes of one number of bits."""

    multiply: Kernel
    round_rows: Kernel
    """Rounds the rows of x once for all threads of `multiply`. Rounding few rows takes less time than waiting
    for other threads, so each thread of `multiply` then does it by itself."""


def count_rounded_bytes(num_rows: int, pieces: int, units: int) -> int:
    """Return the bytes that `round_rows` writes for rows of `pieces` pieces with `units` units each."""
    padded = -(-num_rows // TILE_ROWS) * TILE_ROWS
    row_bytes = -(-units * UNIT * 2 // ROW_BYTES) * ROW_BYTES
    return padded * (row_bytes + 4) * pieces
