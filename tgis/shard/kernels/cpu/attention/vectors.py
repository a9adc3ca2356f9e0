"""Builders of LLVM code that attention's kernels share: vectors of LANES float32 at addresses.

A vector has the same number of lanes on every processor. Where registers are shorter, LLVM uses several for
one vector, with the same results."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.registry import cpu_target

from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I8, I32, at, everywhere, load_stored

LANES = 16

VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
_WIDEST = ("prefer-vector-width", "min-legal-vector-width")


def has_avx512() -> bool:
    """Return True if numba compiles for a processor that has 32 registers of LANES float32."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+avx512f", "+avx512vl"} <= set(features.split(","))


def use_widest(b: Any) -> None:
    """Make LLVM use 512-bit vectors in the function being built.

    By default LLVM avoids them on processors that once ran slower with them; it would split vectors and spill
    the parts."""
    for name in _WIDEST:
        set.add(b.function.attributes, f'"{name}"="512"')  # llvmlite knows no attributes with values


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def load_everywhere(b: Any, base: Any, offset: Any) -> Any:
    """Load one float32 and broadcast it to all lanes."""
    return everywhere(b, b.load(at(b, base, offset, FLOAT), align=4), LANES)


def load(b: Any, base: Any, offset: Any) -> Any:
    return b.load(at(b, base, offset, VECTOR), align=4)


def store(b: Any, x: Any, base: Any, offset: Any) -> None:
    b.store(x, at(b, base, offset, VECTOR), align=4)


def load_lanes(b: Any, base: Any, offset: Any, dtype: Any) -> Any:
    """Load LANES elements of the cache and convert them to float32."""
    return load_stored(b, at(b, base, offset, I8), LANES, dtype, align=2)


@intrinsic
def peek(typingctx: Any, address: Any, element: Any) -> Any:
    """Load a value of `element`'s type from an address, without the reference counting of arrays."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.inttoptr(args[0], args[1].type.as_pointer()))

    return element(types.int64, element), generate


@intrinsic
def poke(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a value at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], args[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, value), generate
