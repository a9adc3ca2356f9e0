"""Builders of LLVM code shared by the kernels of attention: vectors of LANES float32 at addresses. If
registers are shorter, LLVM splits vectors, with the same results."""

from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I32

LANES = 16

VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(I32, LANES)
ZERO = llvm.constant(0.0, LANES)


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
