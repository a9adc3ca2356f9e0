"""The inner loop of matrix products, in LLVM code: rows of x times one panel of a weight, sums in registers.

Every sum is one chain of fused multiply-adds in the order of x's columns, so its bits depend on its own row
and weights alone, whatever else is computed beside it."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import raw_memcpy

from tgis.shard.kernels.cpu.gemm.panels import LANES, PANEL
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I8, I64, at, everywhere, load_stored, loop, prefetch

# Rows at once at most: with their sums, two vectors of weights and one of x, all of a processor's registers.
ROWS = 12 if LANES == 16 else 6
BLOCK = 192  # columns of x at a time: those of a tile and of a panel fit a first-level cache together
TALL = 4 * ROWS  # rows for which weights are made float32 once, and not for each tile
STRIDE = 4 * (BLOCK + 16)  # bytes between rows of a copy of x: with a power of two, they evict each other

# So few rows leave the processor time to fetch weights by itself; with more it must be told what is next.
STREAMED = 2

_VECTOR = ir.VectorType(FLOAT, LANES)
_NONE = ir.Constant(_VECTOR, [0.0] * LANES)
_VECTORS = PANEL // LANES


def _load_weights(b: Any, address: Any, offset: int, dtype: Any) -> Any:
    """A vector of them as float32."""
    return load_stored(b, at(b, address, I64(offset), I8), LANES, dtype, align=32)


def _prefetch(b: Any, address: Any, num_bytes: int) -> None:
    """Asks for what lies there, into the second-level cache."""
    for offset in range(0, num_bytes, 64):
        prefetch(b, address, I64(offset))


def _multiply(b: Any, rows: int, args: Any, dtype: Any) -> None:
    """The code for that many rows."""
    out, out_stride, x, weights, ahead, count, is_first, _ = args
    step = PANEL * dtype.bitwidth // 8
    cells = [(r, v) for r in range(rows) for v in range(_VECTORS)]
    begins = [b.add(out, b.mul(I64(r), out_stride)) for r in range(rows)]
    places = [at(b, begins[r], I64(4 * LANES * v), _VECTOR) for r, v in cells]
    begun = b.icmp_signed("!=", is_first, I64(0))
    initial = [b.select(begun, _NONE, b.load(place, align=4)) for place in places]

    def add_column(k: Any, sums: list[Any]) -> list[Any]:
        weight, column = b.add(weights, b.mul(k, I64(step))), b.add(x, b.mul(k, I64(4)))
        loaded = [_load_weights(b, weight, v * step // _VECTORS, dtype) for v in range(_VECTORS)]
        if rows > STREAMED:
            _prefetch(b, b.add(ahead, b.mul(k, I64(step))), step)
        spread = [
            everywhere(b, b.load(at(b, column, I64(r * STRIDE), FLOAT), align=4), LANES) for r in range(rows)
        ]
        products = [b.fmul(spread[r], loaded[v], **FUSED) for r, v in cells]
        return [b.fadd(total, more, **FUSED) for total, more in zip(sums, products, strict=True)]

    changed = loop(b, count, initial, add_column)
    for place, total in zip(places, changed, strict=True):
        b.store(total, place, align=4)


def _make_tile(fewest: int) -> Any:
    """In a kernel: out[:rows, :PANEL] = x[:rows, :count] @ weights[:count, :PANEL], added to what out is
    unless `is_first`; `fewest` to ROWS rows, at least one column.

    Arguments: rows; out, the bytes between its rows, x, weights, `ahead`, count, is_first; element. `out` and
    `x` are addresses of float32, x's rows STRIDE bytes apart; `weights` is that of a panel of `element`'s
    type. As much as is read of them may be prefetched from the address `ahead`."""

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
# Where TALL rows or more are cut into tiles of equal height, none is lower: less code to compile.
multiply_tall_tile = _make_tile(ROWS * 3 // 4)


@intrinsic
def widen(typingctx: Any, to: Any, weights: Any, count: Any, element: Any) -> Any:
    """In a kernel: `count` rows of a panel of `element`'s type become float32 rows at the address `to`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to, weights, count, _ = args
        dtype = signature.args[-1]
        step = PANEL * dtype.bitwidth // 8

        def widen_row(k: Any, _: list[Any]) -> list[Any]:
            source, target = b.add(weights, b.mul(k, I64(step))), b.add(to, b.mul(k, I64(4 * PANEL)))
            for v in range(_VECTORS):
                place = at(b, target, I64(4 * LANES * v), _VECTOR)
                b.store(_load_weights(b, source, v * step // _VECTORS, dtype), place, align=32)
            return []

        loop(b, count, [], widen_row)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, element), generate


@intrinsic
def copy(typingctx: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """In a kernel: copies bytes from one address to another."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        target, source = (b.inttoptr(address, I8.as_pointer()) for address in args[:2])
        raw_memcpy(b, target, source, args[2], I64(1))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@intrinsic
def fetch_line(typingctx: Any, address: Any) -> Any:
    """In a kernel: asks for the cache line at an address that will be read soon."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _prefetch(b, args[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate
