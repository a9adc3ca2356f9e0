"""Helpers that builders of LLVM code for kernels share: addresses, vectors, loops."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

FLOAT, I1, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FUSED = {"flags": ("contract",)}
STORED = {types.float32: FLOAT, types.uint16: I16, types.int16: ir.HalfType()}
"""LLVM types of stored weights and keys, by numba type: uint16 stands for bfloat16 bits, int16 for float16
bits."""


def at(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Return a pointer to an `element`, `offset` bytes after the address `base`."""
    return b.inttoptr(b.add(base, offset), element.as_pointer())


def everywhere(b: Any, x: Any, lanes: int) -> Any:
    """Broadcast a number to all lanes of a vector."""
    vector = ir.VectorType(x.type, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), x, I32(0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def load_stored(b: Any, place: Any, lanes: int, dtype: Any, align: int) -> Any:
    """Load a vector of a type of STORED and convert it to float32."""
    x = b.load(b.bitcast(place, ir.VectorType(STORED[dtype], lanes).as_pointer()), align=align)
    if dtype == types.int16:
        return b.fpext(x, ir.VectorType(FLOAT, lanes))
    if dtype == types.uint16:
        wide = ir.VectorType(I32, lanes)
        high = b.shl(b.zext(x, wide), ir.Constant(wide, [16] * lanes))
        return b.bitcast(high, ir.VectorType(FLOAT, lanes))
    return x


def prefetch(b: Any, base: Any, offset: Any) -> None:
    """Prefetch the cache line at an address."""
    place = at(b, base, offset, I8)
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [place, I32(0), I32(2), I32(1)])


def loop(b: Any, n: Any, initial: list[Any], build: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit the loop `values = initial; for k in range(n): values = build(k, values)` and return the values.

    n is at least 1."""
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
