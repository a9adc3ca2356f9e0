"""Builders of LLVM code that attention's kernels share: vectors of LANES float32 at addresses, and loops.

A vector has as many lanes on any processor. Where registers are shorter, LLVM takes several for one, and
results are the same."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.registry import cpu_target

from tgis.shard.compiled import intrinsic

LANES = 16

FLOAT, I1, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(32), ir.IntType(64)
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
FUSED = {"flags": ("contract",)}
_STORED = {types.float32: FLOAT, types.uint16: ir.IntType(16), types.int16: ir.HalfType()}
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


def at(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Pointer to an `element`, `offset` bytes behind the address `base`."""
    return b.inttoptr(b.add(base, offset), element.as_pointer())


def everywhere(b: Any, x: Any) -> Any:
    """A float32, or an int32, in all lanes."""
    vector = ir.VectorType(x.type, LANES)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), x, I32(0))
    return b.shuffle_vector(first, first, ir.Constant(INTEGERS, [0] * LANES))


def load_everywhere(b: Any, base: Any, offset: Any) -> Any:
    """The float32 there in all lanes."""
    return everywhere(b, b.load(at(b, base, offset, FLOAT), align=4))


def load(b: Any, base: Any, offset: Any) -> Any:
    return b.load(at(b, base, offset, VECTOR), align=4)


def store(b: Any, x: Any, base: Any, offset: Any) -> None:
    b.store(x, at(b, base, offset, VECTOR), align=4)


def load_stored(b: Any, base: Any, offset: Any, dtype: Any) -> Any:
    """Elements of the cache as float32; uint16 holds bfloat16 bits, int16 float16 bits."""
    x = b.load(at(b, base, offset, ir.VectorType(_STORED[dtype], LANES)), align=2)
    if dtype == types.int16:
        return b.fpext(x, VECTOR)
    if dtype == types.uint16:
        return b.bitcast(b.shl(b.zext(x, INTEGERS), ir.Constant(INTEGERS, [16] * LANES)), VECTOR)
    return x


def prefetch(b: Any, base: Any, offset: Any) -> None:
    """Asks for the cache line there, to be read soon."""
    place = at(b, base, offset, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [place, I32(0), I32(2), I32(1)])


def loop(b: Any, n: Any, initial: list[Any], build: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """values = initial; for k in range(n): values = build(k, values); n is at least 1."""
    before, body, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(body)
    b.position_at_end(body)
    k, values = b.phi(I64), [b.phi(value.type) for value in initial]
    changed = build(k, values)
    following, end = b.add(k, I64(1)), b.block
    for phi, first, next_ in zip([k, *values], [I64(0), *initial], [following, *changed], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_, end)
    b.cbranch(b.icmp_signed("<", following, n), body, done)
    b.position_at_end(done)
    return changed


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
