"""Arguments that describe a matrix of codes to kernels, and the numbers of its codes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tgis.shard.kernels.cuda.codes.packed import OUTPUTS, PackedCodes


class CodeArguments(NamedTuple):
    """Tensors and sizes of `PackedCodes`."""

    codes: Any
    scales: Any
    zeros: Any
    offsets: Any
    table: Any
    order: Any
    num_tiles: Any
    num_groups: Any
    pieces_per_group: Any

    @classmethod
    def of(cls, weight: PackedCodes) -> "CodeArguments":
        return cls(*(getattr(weight, name) for name in cls._fields))


class CodeForm(NamedTuple):
    """Constants of `PackedCodes`."""

    outputs: int
    piece: int
    bits: int
    centre: int
    numbers: str
    shares_scales: bool

    @classmethod
    def of(cls, weight: PackedCodes) -> "CodeForm":
        return cls(OUTPUTS, *(getattr(weight, name) for name in cls._fields[1:]))


@triton.jit
def load_codes(weight, panel, tile, FORM: tl.constexpr):
    """Return the codes of both halves of a tile, int32 [outputs, piece] each."""
    HALF: tl.constexpr = FORM.outputs * FORM.piece
    place = tl.arange(0, FORM.outputs)[:, None] * FORM.piece + tl.arange(0, FORM.piece)[None, :]
    codes = weight.codes + (panel * weight.num_tiles + tile) * (HALF * FORM.bits // 4)
    first = tl.load(codes + place).to(tl.int32)
    if FORM.bits == 4:
        second = first >> 4
        first = first & 15
    else:
        second = tl.load(codes + HALF + place).to(tl.int32)
    return first, second


@triton.jit
def load_planes(weight, panel, piece, FORM: tl.constexpr):
    """Return the scales and zeros of a piece, float32 [outputs, 1], and its offsets, or 0 for those that
    do not exist."""
    group = panel * weight.num_groups + piece // weight.pieces_per_group
    place = group * FORM.outputs + tl.arange(0, FORM.outputs)[:, None]
    scale = tl.load(weight.scales + place).to(tl.float32)
    zero = 0.0
    if weight.zeros is not None:
        zero = tl.load(weight.zeros + place).to(tl.float32)
    offset = 0.0
    if weight.offsets is not None:
        offset = tl.load(weight.offsets + place).to(tl.float32)
    return scale, zero, offset


@triton.jit
def find_numbers(weight, codes, zero, FORM: tl.constexpr):
    """Return the numbers of codes minus zeros as float32. Bit patterns replace conversions of integers, which
    run at a quarter of the rate."""
    if FORM.numbers == "table":
        number = tl.load(weight.table + codes)
    elif FORM.numbers == "float8":
        # e4m3 has the sign, 4 bits of exponent and 3 of mantissa; its bias is 120 less than that of float32.
        bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        number = (codes | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 + code
        if weight.zeros is not None:
            number -= zero + 8388608.0
        else:
            number -= FORM.centre + 8388608.0
    return number
