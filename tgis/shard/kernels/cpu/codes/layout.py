"""Memory layout of codes for products. A matrix is split into panels of COLUMNS columns of W^T, and a panel
into pieces of up to PIECE columns of x that share a scale. A piece consists of the scales of the panel's
columns, optional offsets, both in a `ScaleForm`, and units of UNIT columns of x.

A unit of 2, 3, 5 or 6 bits (`PACKED_BITS`) has two strips, each with half of the panel's columns. A strip has
parts of 4, 2 or 1 bytes per column whose sizes add up to the number of bits: 5 bits are parts of 4 and 1
bytes. The bytes of a column in a part hold as many whole codes as fit, from the lowest bit. The remaining
bits of all parts hold the last code, its lowest bits in the first part. Codes are integers in two's
complement.

A unit of 8 bits without rounded activations has UNIT rows of COLUMNS bytes. Other units consist of 32-bit
words, each with codes of one column: for 8 bits, two words of four codes, the first in the lowest byte; for 4
bits, one word whose bytes hold codes 0 to 3 in the lower halves and 4 to 7 in the upper halves. VNNI
multiplies in this order.

With AVX2 or NEON, a unit of 4 bits without rounded activations has two strips, each with half of the
panel's columns in UNIT / 4 rows of COLUMNS bytes. Row i holds codes 4i to 4i + 3 of a column in two bytes
that are AFTER bytes apart: 4i and 4i + 2 in the lower and upper half of the first, 4i + 1 and 4i + 3 in those
of the second. The order of columns (`find_places`) is the one that interleaving instructions produce."""

from enum import IntEnum
from typing import NamedTuple

from numba import types

from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit.llvm import has_feature

LOOKS_UP_BYTES = LANES == 8 and (has_feature("avx2") or has_feature("neon"))
"""True if products use instructions that look up bytes, which AVX2 and ARM's NEON have."""
HAS_TABLES = LANES == 16 or LOOKS_UP_BYTES
"""True if the processor has instructions for look-ups in a table of 16 numbers."""


PACKED_BITS = (2, 3, 5, 6)


class ScaleForm(IntEnum):
    """Form of scales and offsets. Integers are multiples of float32 factors that several pieces share. With 4
    bits, the lower half of a byte is a scale and the upper half an offset."""

    float32 = 0
    float16 = 1
    bfloat16 = 2
    int8 = 3
    uint4 = 4

    @property
    def size(self) -> int:
        """Bytes of a scale, or of a scale with its offset in 4 bits each."""
        return (4, 2, 2, 1, 1)[self]

    def count_bytes(self, has_offsets: bool) -> int:
        """Return the bytes of a column's scale and offset."""
        return self.size * (2 if has_offsets and self != ScaleForm.uint4 else 1)


class Kind(NamedTuple):
    """Kind of products. If activations are rounded, codes of 4 and 8 bits are unsigned, integers plus half
    their range. Otherwise, codes of 4 bits are indices of a table of 16 floats, and codes of 8 bits are
    signed integers."""

    bits: int
    rounds_activations: bool
    has_any_numbers: bool = False
    """AVX2 and NEON: True if look-ups cover all bytes of numbers. If False, the numbers fit bfloat16."""

    @property
    def is_packed(self) -> bool:
        return self.bits in PACKED_BITS

    @property
    def is_unsigned(self) -> bool:
        return self.bits == 4 or (self.rounds_activations and not self.is_packed)

    @property
    def column_bytes(self) -> int:
        """Bytes between the codes of adjacent columns of W^T, on average over a strip."""
        if self.is_packed:
            return self.bits
        return 4 if self.is_unsigned else 1

    @property
    def has_halves(self) -> bool:
        """True if bytes hold two codes of a column of W^T in the layout for AVX2 and NEON."""
        return LOOKS_UP_BYTES and self.bits == 4 and not self.rounds_activations


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
"""Kinds by the numba type that represents them in kernels."""

VECTORS = 4
COLUMNS = LANES * VECTORS
UNIT = 8
PIECE = 128
UNIT_BIT = UNIT * COLUMNS // 8  # bytes of a unit per bit of a code
PLANE = 4 * COLUMNS  # bytes of float32 scales, offsets or factors of a panel's columns
AFTER = 8


def find_places(kind: Kind) -> list[int]:
    """Return the offset of each column's first byte in a unit whose bytes hold two codes. Instructions
    interleave the bytes of each half of a 32-byte vector."""
    if kind.has_any_numbers:
        within = [[4 * v + i for i in range(4)] for v in range(2)]
    else:
        within = [[2 * i + v for i in range(4)] for v in range(2)]
    half = [16 * half + place for places in within for half in range(2) for place in places]
    return half + [UNIT * COLUMNS // 4 + place for place in half]


class Part(NamedTuple):
    """Part of a strip of packed codes."""

    size: int  # bytes per column
    offset: int  # bytes per column in earlier parts
    first: int  # first code
    num_codes: int  # whole codes
    rest: int  # remaining bits, which hold bits of the last code
    taken: int  # lower bits of the last code in earlier parts


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
