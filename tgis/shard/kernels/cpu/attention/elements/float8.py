"""8-bit floats as elements of the cache: e4m3 has 4 exponent bits and 3 mantissa bits, e5m2 has 5 and 2.

They are read as float16. e5m2 is the upper byte of a float16. The bits of an e4m3, moved into a float16, give
the value times 2^-8, also for subnormals; `Pages` holds the factor, so that keys and values need no
multiplication. Only NaN gets lost. Therefore a token whose key or value contains NaN gets NaN in the first
channel of its key, and its scores start from that NaN."""

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, HALF, I1, I8, I16, I32

NAN = 0x7F  # code with which NaN is written


class Float8(NamedTuple):
    mantissa: int  # bits of the mantissa
    bias: int  # bias of the exponent
    largest: float
    read_factor: float
    """Value of a number divided by its bits read as float16."""


# numba type of the elements -> format.
FORMATS = {types.int8: Float8(3, 7, 448.0, 2.0**8), types.uint8: Float8(2, 15, 57344.0, 1.0)}
# Type of the cache -> a value of the numba type of its elements.
FLOAT8_ELEMENTS = {torch.float8_e4m3fn: np.int8(0), torch.float8_e5m2: np.uint8(0)}
READ_FACTORS = {
    dtype: FORMATS[kind].read_factor
    for dtype, kind in ((torch.float8_e4m3fn, types.int8), (torch.float8_e5m2, types.uint8))
}


def load_float8(b: Any, address: Any, lanes: int, element: Any) -> Any:
    """Load a vector of a type of FORMATS and convert it to float32, divided by its `read_factor`."""
    codes, words = (ir.VectorType(kind, lanes) for kind in (I8, I16))
    x = b.load(llvm.pointer_to(b, codes, address), align=1)
    if element == types.int8:
        # Clear the copy of the sign in the exponent.
        x = b.and_(b.shl(b.sext(x, words), _constant(7, lanes)), _constant(0xBFFF, lanes))
    else:
        x = b.shl(b.zext(x, words), _constant(8, lanes))
    return b.fpext(b.bitcast(x, ir.VectorType(HALF, lanes)), ir.VectorType(FLOAT, lanes))


def _constant(value: int, lanes: int) -> Any:
    return llvm.constant(value, lanes, I16)


def find_nan(b: Any, address: Any, lanes: int) -> Any:
    """Load a vector of e4m3. Return float32 NaN where an element is NaN, otherwise 0."""
    codes = ir.VectorType(I8, lanes)
    x = b.load(llvm.pointer_to(b, codes, address), align=1)
    is_nan = b.icmp_signed("==", x, llvm.constant(NAN, lanes, I8))
    return b.select(is_nan, llvm.constant(float("nan"), lanes), llvm.constant(0.0, lanes))


@llvm_function(types.boolean)
def loses_nan(b: Any, element: Any) -> Any:
    """Return True if reading elements of this type loses NaN."""
    return I1(element == types.int8)


def build_float8(b: Any, x: Any, element: Any) -> Any:
    """Emit the rounding of float32 `x` to a type of FORMATS, half to even. Large numbers are clamped."""
    form = FORMATS[element]
    bits = b.bitcast(x, I32)
    magnitude = b.and_(bits, I32(0x7FFFFFFF))
    largest = b.bitcast(FLOAT(form.largest), I32)
    is_nan = b.icmp_unsigned(">", magnitude, I32(0x7F800000))
    magnitude = b.select(b.icmp_unsigned(">", magnitude, largest), largest, magnitude)
    dropped = 23 - form.mantissa
    even = b.and_(b.lshr(magnitude, I32(dropped)), I32(1))
    rounded = b.add(b.add(magnitude, I32((1 << (dropped - 1)) - 1)), even)
    normal = b.sub(b.lshr(rounded, I32(dropped)), I32((127 - form.bias) << form.mantissa))
    # The addition rounds to a multiple of the smallest subnormal, which is then in the lowest bits.
    step = 2.0 ** (24 - form.bias - form.mantissa)
    subnormal = b.bitcast(b.fadd(b.bitcast(magnitude, FLOAT), FLOAT(step)), I32)
    subnormal = b.sub(subnormal, b.bitcast(FLOAT(step), I32))
    is_small = b.fcmp_ordered("<", b.bitcast(magnitude, FLOAT), FLOAT(2.0 ** (1 - form.bias)))
    code = b.select(is_nan, I32(NAN), b.select(is_small, subnormal, normal))
    sign = b.and_(b.lshr(bits, I32(24)), I32(0x80))
    return b.trunc(b.select(is_nan, code, b.or_(code, sign)), I8)
