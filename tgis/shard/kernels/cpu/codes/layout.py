"""Memory layout of codes for products. A matrix is cut into panels of COLUMNS columns of W^T, and a panel
into pieces of at most PIECE columns of x that share a scale. A piece has units of UNIT columns of x, then a
float32 scale for each column of the panel.

A unit of 8 bits whose activations are not rounded is UNIT rows of COLUMNS bytes. Other units hold words of
32 bits, each with codes of one column: of 8 bits, two words with four codes each, the first in the lowest
byte; of 4 bits, one word whose bytes hold codes 0 to 3 in their lower and 4 to 7 in their upper halves. This
is the order in which VNNI multiplies."""

from typing import NamedTuple

from numba import types

from tgis.shard.kernels.cpu.gemm.panels import LANES


class Kind(NamedTuple):
    """Kind of products. Codes of 4 bits are indices of a table of 16 floats. Where activations are rounded,
    codes are integers plus half their range, unsigned; else those of 8 bits are integers."""

    bits: int
    rounds_activations: bool

    @property
    def has_words(self) -> bool:
        return self.bits == 4 or self.rounds_activations


KINDS = {
    types.uint8: Kind(4, False),
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
