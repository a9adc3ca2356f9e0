"""Memory layout of codes for products. A matrix is cut into panels of COLUMNS columns of W^T, and a panel
into pieces of at most PIECE columns of x that share a scale. A piece has units of UNIT columns of x, then a
float32 scale for each column of the panel.

A unit of 8 bits whose activations are not rounded is UNIT rows of COLUMNS bytes. Other units hold words of
32 bits, each with codes of one column: of 8 bits, two words with four codes each, the first in the lowest
byte; of 4 bits, one word whose bytes hold codes 0 to 3 in their lower and 4 to 7 in their upper halves. This
is the order in which VNNI multiplies.

With AVX2, a unit of 4 bits whose activations are not rounded is two strips of half the panel's columns, each
of UNIT / 4 rows of COLUMNS bytes. Two bytes of row i hold codes 4i to 4i + 3 of a column: codes 4i and 4i + 2
the lower and upper half of a byte, 4i + 1 and 4i + 3 those of the byte that is AFTER bytes behind. Columns
are in the order (`find_places`) in which instructions that interleave bytes leave the numbers."""

from typing import NamedTuple

from numba import types

from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit.llvm import has_feature

HAS_AVX2 = LANES == 8 and has_feature("avx2")
"""True if vectors are those of AVX2."""
HAS_TABLES = LANES == 16 or HAS_AVX2
"""True if the processor has instructions that look numbers up in a table of 16."""


class Kind(NamedTuple):
    """Kind of products. Codes of 4 bits are indices of a table of 16 floats. Where activations are rounded,
    codes are integers plus half their range, unsigned; else those of 8 bits are integers."""

    bits: int
    rounds_activations: bool
    has_any_numbers: bool = False
    """True if AVX2 looks up all bits of numbers. Else the table is that of the integers from -8 on there."""

    @property
    def is_unsigned(self) -> bool:
        return self.bits == 4 or self.rounds_activations

    @property
    def has_halves(self) -> bool:
        """True if bytes hold two codes of one column of W^T in the order of AVX2."""
        return HAS_AVX2 and self.bits == 4 and not self.rounds_activations


KINDS = {
    types.uint8: Kind(4, False),
    types.uint32: Kind(4, False, has_any_numbers=True),
    types.int8: Kind(8, False),
    types.uint16: Kind(4, True),
    types.int16: Kind(8, True),
}
"""Kinds by the numba type that stands for them."""

VECTORS = 4
COLUMNS = LANES * VECTORS
UNIT = 8
PIECE = 128
SCALES = 4 * COLUMNS  # bytes of a piece's scales
UNIT_BIT = UNIT * COLUMNS // 8  # bytes of a unit for each bit of a code
AFTER = 8


def find_places(kind: Kind) -> list[int]:
    """Return the places of columns' first bytes in a unit whose bytes hold two codes each. Instructions
    interleave the bytes of each half of a vector of 32."""
    if kind.has_any_numbers:
        within = [[4 * v + i for i in range(4)] for v in range(2)]
    else:
        within = [[2 * i + v for i in range(4)] for v in range(2)]
    half = [16 * half + place for places in within for half in range(2) for place in places]
    return half + [UNIT * COLUMNS // 4 + place for place in half]
