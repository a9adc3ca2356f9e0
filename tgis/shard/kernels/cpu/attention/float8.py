"""Floats of 8 bits as elements of the cache: e4m3 has 4 bits of exponent and 3 of mantissa, e5m2 has 5 and 2.

They are read as float16. An e5m2 is the upper byte of one. The bits of an e4m3 fit into one that is 2^8 times
smaller, subnormals included; the factor belongs to `Pages`, so that no key or value is multiplied by it. Only
NaN is lost so: therefore a token whose key or value has a NaN gets one in the first channel of its key, and
scores begin with the NaNs that are there."""

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import intrinsic, llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, HALF, I1, I8, I16, I32
from tgis.shard.kernels.cpu.jit.scalar_math import ELEMENTS, build_stored

NAN = 0x7F  # code of NaN, as it is written


class Float8(NamedTuple):
    mantissa: int  # bits
    bias: int  # of the exponent
    largest: float
    read_factor: float
    """Factor that makes a number of what is read as float16."""


# By the type that numba uses for elements.
FORMATS = {types.int8: Float8(3, 7, 448.0, 2.0**8), types.uint8: Float8(2, 15, 57344.0, 1.0)}
_E4M3, _E5M2 = np.int8(0), np.uint8(0)
# For each type of the cache, a value of the type that numba uses for its elements.
CACHE_ELEMENTS = {**ELEMENTS, torch.float8_e4m3fn: _E4M3, torch.float8_e5m2: _E5M2}
READ_FACTORS = {
    dtype: FORMATS[kind].read_factor
    for dtype, kind in ((torch.float8_e4m3fn, types.int8), (torch.float8_e5m2, types.uint8))
}


def load_float8(b: Any, address: Any, lanes: int, element: Any) -> Any:
    """Load a vector of a type of FORMATS and convert it to float32, divided by its `read_factor`."""
    codes, words = (ir.VectorType(kind, lanes) for kind in (I8, I16))
    x = b.load(llvm.pointer_to(b, codes, address), align=1)
    if element == types.int8:
        # The copy of the sign that would be in the exponent is cleared.
        x = b.and_(b.shl(b.sext(x, words), _constant(7, lanes)), _constant(0xBFFF, lanes))
    else:
        x = b.shl(b.zext(x, words), _constant(8, lanes))
    return b.fpext(b.bitcast(x, ir.VectorType(HALF, lanes)), ir.VectorType(FLOAT, lanes))


def _constant(value: int, lanes: int) -> Any:
    return llvm.constant(value, lanes, I16)


def find_nan(b: Any, address: Any, lanes: int) -> Any:
    """Load a vector of e4m3; return float32 NaN for those that are NaN, and 0 for others."""
    codes = ir.VectorType(I8, lanes)
    x = b.load(llvm.pointer_to(b, codes, address), align=1)
    is_nan = b.icmp_signed("==", x, llvm.constant(NAN, lanes, I8))
    return b.select(is_nan, llvm.constant(float("nan"), lanes), llvm.constant(0.0, lanes))


@llvm_function(types.boolean)
def loses_nan(b: Any, element: Any) -> Any:
    """Return True if elements of that type are read without regard to NaN."""
    return I1(element == types.int8)


@intrinsic
def as_element(typingctx: Any, x: Any, element: Any) -> Any:
    """Convert float32 `x` to a type of CACHE_ELEMENTS. What is larger than all numbers of 8 bits becomes the
    largest of them."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if element in FORMATS:
            return _build_float8(b, args[0], FORMATS[element])
        return build_stored(b, args[0], element)

    return element(types.float32, element), generate


def _build_float8(b: Any, x: Any, form: Float8) -> Any:
    """Round to 8 bits, half to even."""
    bits = b.bitcast(x, I32)
    magnitude = b.and_(bits, I32(0x7FFFFFFF))
    largest = b.bitcast(FLOAT(form.largest), I32)
    is_nan = b.icmp_unsigned(">", magnitude, I32(0x7F800000))
    magnitude = b.select(b.icmp_unsigned(">", magnitude, largest), largest, magnitude)
    dropped = 23 - form.mantissa
    even = b.and_(b.lshr(magnitude, I32(dropped)), I32(1))
    rounded = b.add(b.add(magnitude, I32((1 << (dropped - 1)) - 1)), even)
    normal = b.sub(b.lshr(rounded, I32(dropped)), I32((127 - form.bias) << form.mantissa))
    # The addition rounds to a multiple of the smallest number, which is then in the lowest bits.
    step = 2.0 ** (24 - form.bias - form.mantissa)
    subnormal = b.bitcast(b.fadd(b.bitcast(magnitude, FLOAT), FLOAT(step)), I32)
    subnormal = b.sub(subnormal, b.bitcast(FLOAT(step), I32))
    is_small = b.fcmp_ordered("<", b.bitcast(magnitude, FLOAT), FLOAT(2.0 ** (1 - form.bias)))
    code = b.select(is_nan, I32(NAN), b.select(is_small, subnormal, normal))
    sign = b.and_(b.lshr(bits, I32(24)), I32(0x80))
    return b.trunc(b.select(is_nan, code, b.or_(code, sign)), I8)
