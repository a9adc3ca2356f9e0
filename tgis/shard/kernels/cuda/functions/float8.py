"""8-bit floats as elements of the cache: e4m3 has 4 exponent bits and 3 mantissa bits, e5m2 has 5 and 2.

Kernels read and write them as bytes. Numbers are rounded as on CPUs, to the same bytes. All of them are exact
in float16 and bfloat16."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.functions.processors import find_capability

FLOAT8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
NAN = tl.constexpr(0x7F)  # code with which NaN is written


class Float8Form(NamedTuple):
    """Constants of a type."""

    mantissa: int  # bits of the mantissa
    bias: int  # bias of the exponent
    largest: int  # bits of the largest number as float32
    is_converted: bool  # by an instruction of the GPU

    @classmethod
    def of(cls, pages: Tensor) -> "Float8Form | None":
        """Return the constants of the cache's type, or None if it has more than 8 bits."""
        if pages.dtype == torch.float8_e4m3fn:
            return cls(3, 7, 0x43E00000, find_capability(pages.device) >= 89)
        if pages.dtype == torch.float8_e5m2:
            return cls(2, 15, 0x47600000, is_converted=False)
        return None


def as_bytes(pages: Tensor) -> Tensor:
    """Return what kernels read and write: the bytes of 8-bit floats, and other pages as they are."""
    return pages.view(torch.uint8) if pages.dtype in FLOAT8_TYPES else pages


def round_plain(x: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """Return float32 numbers, times a factor if they become 8-bit floats, in the cache's type."""
    if dtype not in FLOAT8_TYPES:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    scaled = (x * factor).clamp(-largest, largest)
    return scaled.masked_fill(scaled.isnan(), torch.nan).to(dtype)


@triton.jit
def round_to_float8(x, FORM: tl.constexpr):
    """Return the codes of float32 numbers, rounded half to even. Large numbers are clamped."""
    dropped: tl.constexpr = 23 - FORM.mantissa
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, FORM.largest)
    even = (magnitude >> dropped) & 1
    normal = (magnitude + ((1 << (dropped - 1)) - 1) + even) >> dropped
    normal -= (127 - FORM.bias) << FORM.mantissa
    # The addition rounds to a multiple of the smallest subnormal, which is then in the lowest bits.
    step: tl.constexpr = (151 - FORM.bias - FORM.mantissa) << 23  # bits of a power of 2
    sums = magnitude.to(tl.float32, bitcast=True) + tl.full((), step, tl.int32).to(tl.float32, bitcast=True)
    subnormal = sums.to(tl.int32, bitcast=True) - step
    code = tl.where(magnitude < ((128 - FORM.bias) << 23), subnormal, normal)
    return tl.where(is_nan, NAN, code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def read_float8(codes, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers of codes. The detour through float32 is faster than a conversion of float16 to
    bfloat16, which runs at an eighth of the rate."""
    number = _read_half(codes, FORM)
    return number if dtype == tl.float16 else number.to(tl.float32).to(dtype)


@triton.jit
def _read_half(codes, FORM: tl.constexpr):
    if FORM.is_converted:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if FORM.mantissa == 2:  # the upper byte of a float16
        return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    # The bits in a float16 give the number times 2^-8, also for subnormals. Only NaN gets lost.
    bits = ((codes.to(tl.uint16) & 0x80) << 8) | ((codes.to(tl.uint16) & 0x7F) << 7)
    number = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((codes & 0x7F) == NAN, float("nan"), number)
