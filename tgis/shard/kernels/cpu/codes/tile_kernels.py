"""Kernels of products with codes on AMX tiles, and the memory that they need."""

from typing import NamedTuple

from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.layout import UNIT
from tgis.shard.kernels.cpu.jit.compiler import Kernel


class CodeTileKernels(NamedTuple):
    """Kernels of products with codes of one kind."""

    multiply: Kernel
    round_rows: Kernel
    """Rounds the rows of x once for all threads of `multiply`. Rounding few rows takes less time than waiting
    for other threads, so each thread of `multiply` then does it by itself."""
    value_bytes: int = 2
    """Bytes of a rounded value of x: 2, or 1 with a scale for each piece of a row."""
    min_rows: int = 1
    """Minimum rows of `multiply`. With fewer rows, products without tiles are faster and have the same
    bits."""

    def count_rounded_bytes(self, num_rows: int, pieces: int, units: int) -> int:
        """Return the bytes that `round_rows` writes for rows of `pieces` pieces with `units` units each."""
        padded = -(-num_rows // TILE_ROWS) * TILE_ROWS
        row_bytes = units * UNIT * self.value_bytes
        if row_bytes > ROW_BYTES:
            row_bytes = -(-row_bytes // ROW_BYTES) * ROW_BYTES
        num_numbers = 2 if self.value_bytes == 1 else 1  # sums, and scales of 8-bit values
        return padded * (row_bytes + 4 * num_numbers) * pieces
