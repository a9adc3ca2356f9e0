"""Builders of the LLVM code of matrix products' inner loop: some rows of x times one panel of a weight, with
the sums in registers.

Every sum is one chain of fused multiply-adds in the order of x's columns, so its bits depend only on its own
row and weights, and not on what is computed beside it."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import raw_memcpy

from tgis.shard.kernels.cpu.gemm.panels import LANES, PANEL
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import (
    FLOAT,
    FUSED,
    I8,
    I64,
    broadcast,
    constant,
    load_stored,
    loop,
    pointer_to,
    prefetch,
)

# Most rows of a tile: its sums, two vectors of weights and one of x fill the processor's registers.
ROWS = 12 if LANES == 16 else 6
BLOCK = 192  # columns of x at a time: a tile's and a panel's fit the first-level cache together
MANY_ROWS = 4 * ROWS  # from this many rows on, weights are converted to float32 once and not for each tile
# Bytes between rows of a copy of x. With a power of two, rows would evict each other from the cache.
STRIDE = 4 * (BLOCK + 16)

# With at most this many rows the processor's own prefetching keeps up with the weights; with more rows the
# code prefetches them itself.
STREAMED = 2

_VECTOR = ir.VectorType(FLOAT, LANES)
_VECTORS = PANEL // LANES


def _load_weights(b: Any, address: Any, offset: int, dtype: Any) -> Any:
    """Load a vector of weights and convert it to float32."""
    return load_stored(b, pointer_to(b, I8, address, I64(offset)), LANES, dtype, align=32)


def _prefetch(b: Any, address: Any, num_bytes: int) -> None:
    """Prefetch `num_bytes` bytes from an address into the second-level cache."""
    for offset in range(0, num_bytes, 64):
        prefetch(b, address, I64(offset))


def _multiply(b: Any, rows: int, args: Any, dtype: Any) -> None:
    """Emit the code of a tile of `rows` rows."""
    out, out_stride, x, weights, ahead, count, is_first, _ = args
    step = PANEL * dtype.bitwidth // 8
    cells = [(r, v) for r in range(rows) for v in range(_VECTORS)]
    begins = [b.add(out, b.mul(I64(r), out_stride)) for r in range(rows)]
    places = [pointer_to(b, _VECTOR, begins[r], I64(4 * LANES * v)) for r, v in cells]
    is_cleared, zero = b.icmp_signed("!=", is_first, I64(0)), constant(0.0, LANES)
    initial = [b.select(is_cleared, zero, b.load(place, align=4)) for place in places]

    def add_column(k: Any, sums: list[Any]) -> list[Any]:
        weight, column = b.add(weights, b.mul(k, I64(step))), b.add(x, b.mul(k, I64(4)))
        loaded = [_load_weights(b, weight, v * step // _VECTORS, dtype) for v in range(_VECTORS)]
        if rows > STREAMED:
            _prefetch(b, b.add(ahead, b.mul(k, I64(step))), step)
        values = [b.load(pointer_to(b, FLOAT, column, I64(r * STRIDE)), align=4) for r in range(rows)]
        vectors = [broadcast(b, value, LANES) for value in values]
        products = [b.fmul(vectors[r], loaded[v], **FUSED) for r, v in cells]
        return [b.fadd(total, more, **FUSED) for total, more in zip(sums, products, strict=True)]

    changed = loop(b, count, initial, add_column)
    for place, total in zip(places, changed, strict=True):
        b.store(total, place, align=4)


def _make_tile(fewest: int) -> Any:
    """Build a function for kernels that computes
    out[:rows, :PANEL] += x[:rows, :count] @ weights[:count, :PANEL].

    If `is_first`, the result overwrites out instead. `rows` is `fewest` to ROWS, `count` at least 1. `out`
    and `x` are addresses of float32: out's rows are `out_stride` bytes apart, x's STRIDE bytes. `weights` is
    the address of a panel of `element`'s type. The code may prefetch, from the address `ahead`, as many bytes
    as it reads of `weights`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        end = b.append_basic_block("end")
        cases = b.switch(args[0], end)
        for num_rows in range(fewest, ROWS + 1):
            block = b.append_basic_block(f"rows{num_rows}")
            cases.add_case(I64(num_rows), block)
            b.position_at_end(block)
            _multiply(b, num_rows, args[1:], signature.args[-1])
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    def multiply(
        typingctx: Any,
        rows: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        weights: Any,
        ahead: Any,
        count: Any,
        is_first: Any,
        element: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8, element), generate

    return intrinsic(multiply)


multiply_tile = _make_tile(1)
# Cutting MANY_ROWS rows or more into tiles of equal height gives no smaller tile, so there is less code to
# compile.
multiply_tall_tile = _make_tile(ROWS * 3 // 4)


@intrinsic
def widen(typingctx: Any, to: Any, weights: Any, count: Any, element: Any) -> Any:
    """Convert `count` rows of a panel of `element`'s type to float32 rows at the address `to`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to, weights, count, _ = args
        dtype = signature.args[-1]
        step = PANEL * dtype.bitwidth // 8

        def widen_row(k: Any, _: list[Any]) -> list[Any]:
            source, target = b.add(weights, b.mul(k, I64(step))), b.add(to, b.mul(k, I64(4 * PANEL)))
            for v in range(_VECTORS):
                place = pointer_to(b, _VECTOR, target, I64(4 * LANES * v))
                b.store(_load_weights(b, source, v * step // _VECTORS, dtype), place, align=32)
            return []

        loop(b, count, [], widen_row)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, element), generate


@intrinsic
def copy(typingctx: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes from one address to another."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        target, source = (pointer_to(b, I8, address) for address in args[:2])
        raw_memcpy(b, target, source, args[2], I64(1))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@intrinsic
def fetch_line(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _prefetch(b, args[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate
