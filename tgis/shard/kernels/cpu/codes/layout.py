"""Memory layout of codes for products. A matrix is cut into panels of COLUMNS columns of W^T, and a panel
into pieces of at most PIECE columns of x that share a scale. A piece has scales of the columns of the panel,
then their offsets if there are any, both of a `ScaleForm`, then units of UNIT columns of x.

A unit of 2, 3, 5 or 6 bits (`PACKED_BITS`) is two strips of half the panel's columns. A strip has a part of
4, 2 or 1 bytes for each one in the sum that these make of the number of bits: 5 bits are 4 + 1. The bytes of
a column's codes in a part hold as many codes as fit, from the lowest bit on; the last code is in the bits
that are left over, its lowest bits in the first part. Codes are integers in two's complement.

A unit of 8 bits whose activations are not rounded is UNIT rows of COLUMNS bytes. Other units hold words of
32 bits, each with codes of one column: of 8 bits, two words with four codes each, the first in the lowest
byte; of 4 bits, one word whose bytes hold codes 0 to 3 in their lower and 4 to 7 in their upper halves. This
is the order in which VNNI multiplies.

With AVX2, a unit of 4 bits whose activations are not rounded is two strips of half the panel's columns, each
of UNIT / 4 rows of COLUMNS bytes. Two bytes of row i hold codes 4i to 4i + 3 of a column: codes 4i and 4i + 2
the lower and upper half of a byte, 4i + 1 and 4i + 3 those of the byte that is AFTER bytes behind. Columns
are in the order (`find_places`) in which instructions that interleave bytes leave the numbers."""

from enum import IntEnum
from typing import NamedTuple

from numba import types

from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit.llvm import has_feature

HAS_AVX2 = LANES == 8 and has_feature("avx2")
"""True if vectors are those of AVX2."""
HAS_TABLES = LANES == 16 or HAS_AVX2
"""True if the processor has instructions that look numbers up in a table of 16."""


PACKED_BITS = (2, 3, 5, 6)


class ScaleForm(IntEnum):
    """Form of scales and offsets. Integers are multiples of float32 factors that several pieces share; of 4
    bits, the lower half of a byte is a scale and the upper half an offset."""

    float32 = 0
    float16 = 1
    bfloat16 = 2
    int8 = 3
    uint4 = 4

    @property
    def size(self) -> int:
        """Bytes of a scale, or of a scale and an offset of 4 bits."""
        return (4, 2, 2, 1, 1)[self]

    def count_bytes(self, has_offsets: bool) -> int:
        """Return the bytes of a column's scale and offset."""
        return self.size * (2 if has_offsets and self != ScaleForm.uint4 else 1)


class Kind(NamedTuple):
    """Kind of products. Codes of 4 bits are indices of a table of 16 floats. Where activations are rounded,
    codes of 4 and 8 bits are integers plus half their range, unsigned; else those of 8 bits are integers."""

    bits: int
    rounds_activations: bool
    has_any_numbers: bool = False
    """True if AVX2 looks up all bits of numbers. Else the table is that of the integers from -8 on there."""

    @property
    def is_packed(self) -> bool:
        return self.bits in PACKED_BITS

    @property
    def is_unsigned(self) -> bool:
        return self.bits == 4 or (self.rounds_activations and not self.is_packed)

    @property
    def column_bytes(self) -> int:
        """Distance between the codes of adjacent columns of W^T, or their average between two strips."""
        if self.is_packed:
            return self.bits
        return 4 if self.is_unsigned else 1

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
    types.float32: Kind(2, False),
    types.float64: Kind(3, False),
    types.uint64: Kind(5, False),
    types.complex64: Kind(6, False),
    types.boolean: Kind(2, True),
    types.int32: Kind(3, True),
    types.int64: Kind(5, True),
    types.complex128: Kind(6, True),
}
"""Kinds by the numba type that stands for them."""

VECTORS = 4
COLUMNS = LANES * VECTORS
UNIT = 8
PIECE = 128
UNIT_BIT = UNIT * COLUMNS // 8  # bytes of a unit for each bit of a code
PLANE = 4 * COLUMNS  # bytes of float32 scales, offsets or factors of a panel's columns
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


class Part(NamedTuple):
    """Part of a strip of packed codes."""

    size: int  # bytes of a column
    offset: int  # from the strip's beginning, in bytes of a column
    first: int  # code
    num_codes: int  # that fit
    rest: int  # bits left over, of the last code
    taken: int  # lower bits of the last code that are in parts before


def list_parts(bits: int) -> list[Part]:
    """Return the parts of a strip of codes of PACKED_BITS."""
    parts: list[Part] = []
    offset, first, taken = 0, 0, 0
    for size in (4, 2, 1):
        if bits & size:
            count, rest = divmod(8 * size, bits)
            parts.append(Part(size, offset, first, count, rest, taken))
            offset, first, taken = offset + size, first + count, taken + rest
    return parts
