"""Builders of LLVM code that attention's kernels share: vectors of LANES float32 at addresses.

A vector has as many lanes on any processor. Where registers are shorter, LLVM takes several for one, and
results are the same."""

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
    """Whether numba compiles for a processor that has 32 registers of LANES float32."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+avx512f", "+avx512vl"} <= set(features.split(","))


def use_widest(b: Any) -> None:
    """LLVM avoids 512 bits on processors that once ran slower with them, and would spill what it splits."""
    for name in _WIDEST:
        set.add(b.function.attributes, f'"{name}"="512"')  # llvmlite knows no attributes with values


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def load_everywhere(b: Any, base: Any, offset: Any) -> Any:
    """The float32 there in all lanes."""
    return everywhere(b, b.load(at(b, base, offset, FLOAT), align=4), LANES)


def load(b: Any, base: Any, offset: Any) -> Any:
    return b.load(at(b, base, offset, VECTOR), align=4)


def store(b: Any, x: Any, base: Any, offset: Any) -> None:
    b.store(x, at(b, base, offset, VECTOR), align=4)


def load_lanes(b: Any, base: Any, offset: Any, dtype: Any) -> Any:
    """LANES elements of the cache as float32."""
    return load_stored(b, at(b, base, offset, I8), LANES, dtype, align=2)


@intrinsic
def peek(typingctx: Any, address: Any, element: Any) -> Any:
    """In a kernel: what is at an address, of `element`'s type. Unlike an array's, its code counts no
    references, and takes none of the time that they take."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.inttoptr(args[0], args[1].type.as_pointer()))

    return element(types.int64, element), generate


@intrinsic
def poke(typingctx: Any, address: Any, value: Any) -> Any:
    """In a kernel: puts a value at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], args[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, value), generate
