"""Memory layout of codes for products. A matrix is cut into panels of COLUMNS columns of W^T, and a panel
into pieces of at most PIECE columns of x that share a scale. A piece has units of UNIT columns of x, then a
float32 scale for each column of the panel.

A unit holds words of 32 bits, each with codes of one column: of 8 bits, two words with four codes each, the
first in the lowest byte; of 4 bits, one word whose bytes hold codes 0 to 3 in their lower and 4 to 7 in their
upper halves. This is the order in which VNNI multiplies."""

from typing import NamedTuple

from numba import types

from tgis.shard.kernels.cpu.gemm.panels import LANES


class Kind(NamedTuple):
    """Kind of products. Codes of 4 bits are indices of a table of 16 floats, or integers from 0 to 15 where
    activations are rounded; those of 8 bits are integers from -128 to 127."""

    bits: int
    rounds_activations: bool


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
