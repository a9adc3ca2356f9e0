"""Builders of LLVM code shared by the kernels of attention and of recurrent layers: vectors of LANES float32
at addresses. If registers are shorter, LLVM splits vectors, with the same results."""

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I32

LANES = 16

VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(I32, LANES)
ZERO = llvm.constant(0.0, LANES)
# Coefficients of a polynomial for 2^f, |f| <= 1/2, highest power first. The relative error is 1e-7, and the
# value at 0 is exactly 1.
_POWERS = [
    llvm.constant(coefficient, LANES)
    for coefficient in (
        *(0.001326472731307149, 0.009671512991189957, 0.05550733581185341),
        *(0.24022242426872253, 0.6931470036506653, 1.0),
    )
]
_LOG2_E = llvm.constant(1.4426950216293335, LANES)
# Adding this rounds a number of moderate size to an integer. The lowest bits of the sum then hold the integer
# plus the bias of the exponent.
_ROUNDING = llvm.constant(1.5 * 2**23 + 127, LANES)
_MIN_EXPONENT = llvm.constant(-86.0, LANES)  # smaller exponents are clamped to this


def prefer_512_bits(b: Any) -> None:
    """Make LLVM use 512-bit vectors in the function being built. By default it avoids them on processors
    whose clock they may reduce, and would then split vectors and spill the parts."""
    for name in ("prefer-vector-width", "min-legal-vector-width"):
        set.add(b.function.attributes, f'"{name}"="512"')  # llvmlite does not support attributes with values


def load(b: Any, base: Any, offset: Any) -> Any:
    return llvm.load_vector(b, b.add(base, offset), LANES)


def store(b: Any, x: Any, base: Any, offset: Any) -> None:
    llvm.store_vector(b, x, b.add(base, offset))


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z for vectors, with one rounding."""
    return llvm.call(b, f"llvm.fma.v{LANES}f32", VECTOR, x, y, z)


def exp(b: Any, x: Any) -> Any:
    """Return e^x of a vector, x at most 0. NaN gives NaN."""
    clamped = b.select(b.fcmp_ordered("<", x, _MIN_EXPONENT), _MIN_EXPONENT, x)
    shifted = multiply_add(b, clamped, _LOG2_E, _ROUNDING)
    whole = b.fsub(shifted, _ROUNDING, **FUSED)
    f = multiply_add(b, clamped, _LOG2_E, b.fneg(whole))
    p = reduce(lambda p, c: multiply_add(b, p, f, c), _POWERS)
    power = b.shl(b.bitcast(shifted, INTEGERS), llvm.constant(23, LANES, I32))
    return b.fmul(p, b.bitcast(power, VECTOR))


def silu(b: Any, x: Any) -> Any:
    """Return x / (1 + e^-x) of a vector. NaN gives NaN."""
    shrunk = exp(b, b.fneg(llvm.call(b, f"llvm.fabs.v{LANES}f32", VECTOR, x)))
    above = b.select(b.fcmp_ordered("<", x, ZERO), b.fmul(x, shrunk), x)
    return b.fdiv(above, b.fadd(shrunk, llvm.constant(1.0, LANES)))


@intrinsic
def peek(typingctx: Any, address: Any, element: Any) -> Any:
    """Load a value of `element`'s type from an address, without the reference counts of arrays."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(llvm.pointer_to(b, args[1].type, args[0]))

    return element(types.int64, element), generate


@intrinsic
def poke(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a value at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], llvm.pointer_to(b, args[1].type, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, value), generate
