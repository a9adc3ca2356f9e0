"""Helpers for builders of LLVM code: pointers, vectors, calls, loops."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.registry import cpu_target

from tgis.shard.kernels.cpu.jit import arm


class _BfloatType(ir.Type):  # type: ignore[misc]
    """LLVM's type of bfloat16, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BfloatType)

    def __hash__(self) -> int:
        return hash(_BfloatType)


HALF = ir.HalfType()
FLOAT = ir.FloatType()
BFLOAT = _BfloatType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FUSED = {"flags": ("contract",)}
STORED = {types.float32: FLOAT, types.uint16: I16, types.int16: HALF}
"""LLVM types of stored weights and keys, by numba type: uint16 means bfloat16 bits, int16 float16 bits."""


arm.complete_features()  # before code is generated


def has_feature(name: str) -> bool:
    """Return True if kernels are compiled for a processor with an LLVM feature."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{name}" in features.split(",")


def architecture() -> str:
    """Return the architecture for which kernels are compiled, such as x86_64 or aarch64."""
    triple: str = cpu_target.target_context.codegen().magic_tuple()[0]
    return triple.partition("-")[0]


def processor_name() -> str:
    """Return LLVM's name of the processor for which kernels are compiled, such as znver4."""
    name: str = cpu_target.target_context.codegen().magic_tuple()[1]
    return name


def constant(value: float, lanes: int, element: Any = FLOAT) -> Any:
    """Return a constant vector with the value in all lanes."""
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def broadcast(b: Any, x: Any, lanes: int) -> Any:
    vector = ir.VectorType(x.type, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), x, I32(0))
    return b.shuffle_vector(first, first, constant(0, lanes, I32))


def shuffle(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    """Return a vector of selected lanes of x and y. Lanes of y are numbered after those of x."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def transpose(b: Any, rows: list[Any]) -> list[Any]:
    """Return the columns of a square matrix as vectors. `rows` are vectors, as many as each has lanes, a
    power of two."""
    count = len(rows)
    distance = 1
    while distance < count:
        moved = list(rows)
        for i in (i for i in range(count) if not i & distance):
            x, y = rows[i], rows[i + distance]
            low = [lane + count - distance if lane & distance else lane for lane in range(count)]
            high = [lane + count if lane & distance else lane + distance for lane in range(count)]
            moved[i], moved[i + distance] = shuffle(b, x, y, low), shuffle(b, x, y, high)
        rows = moved
        distance = 2 * distance
    return rows


def call(b: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic or a library's function by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(get_or_insert_function(b.module, kind, name), args)


def pointer_to(b: Any, element: Any, base: Any, offset: Any = None) -> Any:
    """Return a pointer to an `element` at the address `base`, or `offset` bytes after it."""
    address = base if offset is None else b.add(base, offset)
    return b.inttoptr(address, element.as_pointer())


def load_stored(b: Any, address: Any, lanes: int, element: Any, align: int) -> Any:
    """Load a vector of a type of STORED and convert it to float32."""
    x = b.load(pointer_to(b, ir.VectorType(STORED[element], lanes), address), align=align)
    if element == types.int16:
        return b.fpext(x, ir.VectorType(FLOAT, lanes))
    if element == types.uint16:
        high = b.shl(b.zext(x, ir.VectorType(I32, lanes)), constant(16, lanes, I32))
        return b.bitcast(high, ir.VectorType(FLOAT, lanes))
    return x


def round_to_bfloat16(b: Any, x: Any) -> Any:
    """Round float32, a number or a vector, to bfloat16, half to even. Return the bits of the float32, whose
    lower half is zero. NaN is handled separately, because rounding would make some NaNs infinite."""
    integers = ir.VectorType(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32

    def same(value: int) -> Any:
        return constant(value, integers.count, I32) if integers != I32 else I32(value)

    bits = b.bitcast(x, integers)
    even = b.and_(b.lshr(bits, same(16)), same(1))
    rounded = b.and_(b.add(b.add(bits, same(0x7FFF)), even), same(0xFFFF0000))
    return b.select(b.fcmp_unordered("uno", x, x), same(0x7FC00000), rounded)


def load_broadcast(b: Any, address: Any, lanes: int) -> Any:
    """Load one float32 and broadcast it to all lanes."""
    return broadcast(b, b.load(pointer_to(b, FLOAT, address), align=4), lanes)


def first_lanes(b: Any, count: Any, lanes: int) -> Any:
    """Return a mask of the first `count` lanes."""
    numbers = ir.Constant(ir.VectorType(count.type, lanes), list(range(lanes)))
    return b.icmp_signed("<", numbers, broadcast(b, count, lanes))


def load_vector(b: Any, address: Any, lanes: int, mask: Any = None) -> Any:
    """Load float32. Lanes outside the mask are zero."""
    zero = constant(0.0, lanes)
    place = pointer_to(b, zero.type, address)
    if mask is None:
        return b.load(place, align=4)
    return call(b, f"llvm.masked.load.v{lanes}f32.p0", zero.type, place, I32(4), mask, zero)


def store_vector(b: Any, x: Any, address: Any, mask: Any = None, align: int = 4) -> None:
    """Store float32, only lanes in the mask if there is one."""
    place = pointer_to(b, x.type, address)
    if mask is None:
        b.store(x, place, align=align)
    else:
        call(b, f"llvm.masked.store.v{x.type.count}f32.p0", ir.VoidType(), x, place, I32(align), mask)


def add_products(b: Any, sums: list[Any], factors: list[Any], vectors: list[Any]) -> list[Any]:
    """Return sums with sums[r * len(vectors) + v] += factors[r] * vectors[v]."""
    products = [b.fmul(factor, x, **FUSED) for factor in factors for x in vectors]
    return [b.fadd(total, more, **FUSED) for total, more in zip(sums, products, strict=True)]


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z for float32 vectors, with one rounding. LLVM does not always fuse after a
    condition."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def prefetch(b: Any, base: Any, offset: Any) -> None:
    """Prefetch a cache line into the second-level cache."""
    _prefetch(b, base, offset, is_written=0, locality=2)


def prefetch_soon(b: Any, base: Any, offset: Any) -> None:
    """Prefetch a cache line into the first-level cache."""
    _prefetch(b, base, offset, is_written=0, locality=3)


def prefetch_for_writing(b: Any, base: Any, offset: Any) -> None:
    """Prefetch a cache line into the first-level cache for exclusive use by this core."""
    _prefetch(b, base, offset, is_written=1, locality=3)


def _prefetch(b: Any, base: Any, offset: Any, is_written: int, locality: int) -> None:
    place = pointer_to(b, I8, base, offset)
    call(b, "llvm.prefetch.p0", ir.VoidType(), place, I32(is_written), I32(locality), I32(1))


def loop(
    b: Any,
    n: Any,
    initial: list[Any],
    build: Callable[[Any, list[Any]], list[Any]],
    unrolls: bool = True,
) -> list[Any]:
    """Emit `values = initial; for k in range(n): values = build(k, values)`; return the values. n >= 1. LLVM
    may unroll the loop unless `unrolls` is False."""
    before = b.block
    body = b.append_basic_block("loop")
    done = b.append_basic_block("done")
    b.branch(body)
    b.position_at_end(body)
    k = b.phi(I64)
    values = [b.phi(value.type) for value in initial]
    changed = build(k, values)
    following = b.add(k, I64(1))
    end = b.block
    for phi, first, next_ in zip([k, *values], [I64(0), *initial], [following, *changed], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_, end)
    branch = b.cbranch(b.icmp_signed("<", following, n), body, done)
    if not unrolls:
        branch.set_metadata("llvm.loop", _forbid_unrolling(b.module))
    b.position_at_end(done)
    return changed


def _forbid_unrolling(module: Any) -> Any:
    """Return the metadata of a loop. Its first operand is itself, by which LLVM recognises it."""
    option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.MDValue(module, [option], name=str(len(module.metadata)))
    node.operands = (node, option)
    return node


def loop_range(
    b: Any, begin: Any, end: Any, step: int, initial: list[Any], build: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit `for k in range(begin, end, step): values = build(k, values)` from `initial`; return values."""
    before, test, body, done = b.block, *(b.append_basic_block(name) for name in ("test", "body", "done"))
    b.branch(test)
    b.position_at_end(test)
    k = b.phi(I64)
    values = [b.phi(value.type) for value in initial]
    b.cbranch(b.icmp_signed("<", k, end), body, done)
    b.position_at_end(body)
    changed = build(k, values)
    following = b.add(k, I64(step))
    inside = b.block
    b.branch(test)
    for phi, first, next_ in zip([k, *values], [begin, *initial], [following, *changed], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_, inside)
    b.position_at_end(done)
    return values


def choose(b: Any, block: Any, value: Any, other_block: Any, other: Any) -> Any:
    """Return `value` or `other`, depending on the block from which control came."""
    chosen = b.phi(value.type)
    chosen.add_incoming(value, block)
    chosen.add_incoming(other, other_block)
    return chosen
