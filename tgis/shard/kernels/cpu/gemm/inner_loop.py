"""Builders of the LLVM code of matrix products' inner loop: some rows of x times one panel of a weight, with
the sums in registers. Every sum is one chain of fused multiply-adds in the order of x's columns, so its bits
depend only on its own row and weights. In panels of pairs (`pairs.py`), a column is a pair of x's columns."""

from typing import Any

from numba.core.cgutils import raw_memcpy

from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.pairs import PAIR
from tgis.shard.kernels.cpu.gemm.panels import LANES, PANEL
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I8, I64

# Most rows of a tile: its sums, two vectors of weights and one of x fill the processor's registers.
ROWS = 12 if LANES == 16 else 6
BLOCK = 192  # most columns of x at a time: a tile's and a panel's fit the first-level cache together
MANY_ROWS = 4 * ROWS  # from this many rows on, weights are converted to float32 once and not for each tile
# Bytes between rows of a copy of x. With a power of two, rows would evict each other from the cache.
STRIDE = 4 * (BLOCK + 16)

# With at most this many rows the processor's own prefetching keeps up with the weights; with more rows the
# code prefetches them itself. Rows of pairs take half the time.
STREAMED, STREAMED_PAIRS = 2, 4

_VECTORS = PANEL // LANES


def _load_weights(b: Any, address: Any, offset: int, element: Any) -> Any:
    place = b.add(address, I64(offset))
    if element == PAIR:
        return pairs.load(b, place, LANES)
    return llvm.load_stored(b, place, LANES, element, align=32)


def _load_factor(b: Any, address: Any, element: Any) -> Any:
    load = pairs.load_broadcast if element == PAIR else llvm.load_broadcast
    return load(b, address, LANES)


def _add_products(b: Any, sums: list[Any], factors: list[Any], weights: list[Any], element: Any) -> list[Any]:
    add = pairs.add_products if element == PAIR else llvm.add_products
    return add(b, sums, factors, weights)


def _prefetch(b: Any, address: Any, num_bytes: int) -> None:
    """Prefetch `num_bytes` bytes from an address into the second-level cache."""
    for offset in range(0, num_bytes, 64):
        llvm.prefetch(b, address, I64(offset))


def _make_tile(fewest: int) -> Any:
    """Build a function for kernels that computes
    out[:rows, :PANEL] += x[:rows, :count] @ weights[:count, :PANEL].

    If `is_first`, the result overwrites out instead. `rows` is `fewest` to ROWS, `count` at least 1. `out`
    and `x` are addresses of float32: out's rows are `out_stride` bytes apart, x's STRIDE bytes. `weights` is
    the address of a panel of `element`'s type. The code may prefetch, from the address `ahead`, as many bytes
    as it reads of `weights`."""

    @llvm_function()
    def multiply(
        b: Any,
        rows: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        weights: Any,
        ahead: Any,
        count: Any,
        is_first: Any,
        element: Any,
    ) -> None:
        end = b.append_basic_block("end")
        cases = b.switch(rows, end)
        for num_rows in range(fewest, ROWS + 1):
            block = b.append_basic_block(f"rows{num_rows}")
            cases.add_case(I64(num_rows), block)
            b.position_at_end(block)
            begins = [b.add(out, b.mul(I64(r), out_stride)) for r in range(num_rows)]
            _multiply(b, begins, x, weights, ahead, count, is_first, element)
            b.branch(end)
        b.position_at_end(end)

    return multiply


def _multiply(
    b: Any, begins: list[Any], x: Any, weights: Any, ahead: Any, count: Any, is_first: Any, element: Any
) -> None:
    """Emit the code of a tile whose rows of out begin at these addresses."""
    step = PANEL * element.bitwidth // 8
    cells = [(r, v) for r in range(len(begins)) for v in range(_VECTORS)]
    places = [b.add(begins[r], I64(4 * LANES * v)) for r, v in cells]
    is_cleared, zero = b.icmp_signed("!=", is_first, I64(0)), llvm.constant(0.0, LANES)
    initial = [b.select(is_cleared, zero, llvm.load_vector(b, place, LANES)) for place in places]

    def add_column(k: Any, sums: list[Any]) -> list[Any]:
        weight, column = b.add(weights, b.mul(k, I64(step))), b.add(x, b.mul(k, I64(4)))
        loaded = [_load_weights(b, weight, v * step // _VECTORS, element) for v in range(_VECTORS)]
        if len(begins) > (STREAMED_PAIRS if element == PAIR else STREAMED):
            _prefetch(b, b.add(ahead, b.mul(k, I64(step))), step)
        changed = []
        for r in range(len(begins)):
            factor = _load_factor(b, b.add(column, I64(r * STRIDE)), element)
            changed += _add_products(b, sums[r * _VECTORS : (r + 1) * _VECTORS], [factor], loaded, element)
        return changed

    for place, total in zip(places, llvm.loop(b, count, initial, add_column), strict=True):
        llvm.store_vector(b, total, place)


multiply_tile = _make_tile(1)
# Cutting MANY_ROWS rows or more into tiles of equal height gives no smaller tile: less code to compile.
multiply_tall_tile = _make_tile(ROWS * 3 // 4)


@llvm_function()
def widen(b: Any, to: Any, weights: Any, count: Any, element: Any) -> None:
    """Convert `count` rows of a panel of `element`'s type to float32 rows at the address `to`."""
    step = PANEL * element.bitwidth // 8

    def widen_row(k: Any, _: list[Any]) -> list[Any]:
        source, target = b.add(weights, b.mul(k, I64(step))), b.add(to, b.mul(k, I64(4 * PANEL)))
        for v in range(_VECTORS):
            loaded = _load_weights(b, source, v * step // _VECTORS, element)
            llvm.store_vector(b, loaded, b.add(target, I64(4 * LANES * v)), align=32)
        return []

    llvm.loop(b, count, [], widen_row)


@llvm_function()
def copy_columns(b: Any, to: Any, source: Any, count: Any, element: Any) -> None:
    """Copy `count` columns of a row of x, float32, to the address `to`, as tiles of `element`'s type read
    them. There are at least one; an odd one of pairs is paired with 0."""
    if element == PAIR:
        pairs.copy_rounded(b, to, source, count)
    else:
        _copy_bytes(b, to, source, b.mul(count, I64(4)))


@llvm_function()
def copy_sums(b: Any, to: Any, source: Any) -> None:
    """Copy a row's sums of a whole panel."""
    for v in range(_VECTORS):
        offset = I64(4 * LANES * v)
        llvm.store_vector(b, llvm.load_vector(b, b.add(source, offset), LANES), b.add(to, offset))


@llvm_function()
def copy(b: Any, to: Any, source: Any, num_bytes: Any) -> None:
    _copy_bytes(b, to, source, num_bytes)


def _copy_bytes(b: Any, to: Any, source: Any, num_bytes: Any) -> None:
    raw_memcpy(b, llvm.pointer_to(b, I8, to), llvm.pointer_to(b, I8, source), num_bytes, I64(1))


@llvm_function()
def fetch_line(b: Any, address: Any) -> None:
    llvm.prefetch(b, address, I64(0))
