"""The QK and PV tiles of attention, vectorised by hand: QK multiplies queries and keys to scores, PV
multiplies softmax weights and values to sums.

A tile takes up to four vectors of columns, each at an address of its own, so a span of keys need not be
contiguous. It keeps its results in registers. Each result is one chain of fused multiply-adds, along the
head's channels (QK) or along the keys (PV), so its bits depend only on its own row and column, and not on the
rest of the tile."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import types

from tgis.shard.kernels.cpu.attention.vectors import (
    LANES,
    ZERO,
    load,
    load_broadcast,
    load_cached,
    prefer_512_bits,
    store,
)
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I1, I64, has_feature, loop, pointer_to, prefetch

GROUPS = 4
SPAN = GROUPS * LANES  # keys of one update of the online softmax
TALL, SHORT = 6, 4  # most rows of a tile: where a unit has many rows, and where it has few
LINE = 64

_TILES = (1, 2, 3, 4, TALL)  # numbers of rows that tiles are built for
# Most result vectors of a tile, so that all fit the registers.
_MAX_VECTORS = 24 if has_feature("avx512f") and has_feature("avx512vl") else 6


class _QkArgs(NamedTuple):
    """Arguments of `multiply_qk`, without the first. `dtype` is a numba type."""

    scores: Any
    q: Any
    q_stride: Any
    places: Any
    stride: Any
    n: Any
    dtype: Any


class _PvArgs(NamedTuple):
    """Arguments of `add_pv_4_vectors` and `add_pv_1_vector`, without the first. `dtype` is a numba type."""

    sums: Any
    sums_stride: Any
    weights: Any
    places: Any
    column: Any
    stride: Any
    n: Any
    dtype: Any


def _width(num_rows: int, num_vectors: int) -> int:
    """Return how many of the vectors a tile of `num_rows` rows takes at once."""
    return next(n for n in (4, 2, 1) if n <= num_vectors and num_rows * n <= _MAX_VECTORS)


def _for_rows(b: Any, rows: Any, num_vectors: int, build: Callable[[int, int, int], None]) -> None:
    """Emit a switch over `rows`, one of _TILES.

    Each case calls build(number of rows, first vector, number of vectors) until all vectors are covered."""
    done = b.append_basic_block("done")
    blocks = [b.append_basic_block(f"rows_{n}") for n in _TILES]
    switch = b.switch(rows, blocks[-1])
    for n, block in zip(_TILES, blocks, strict=True):
        if n != TALL:
            switch.add_case(I64(n), block)
        b.position_at_end(block)
        width = _width(n, num_vectors)
        for first in range(0, num_vectors, width):
            build(n, first, width)
        b.branch(done)
    b.position_at_end(done)


def _products(b: Any, sums: list[Any], factors: list[Any], loaded: list[Any]) -> list[Any]:
    """Return sums with sums[r * len(loaded) + v] += factors[r] * loaded[v]."""
    products = [b.fmul(factor, x, **FUSED) for factor in factors for x in loaded]
    return [b.fadd(total, more, **FUSED) for total, more in zip(sums, products, strict=True)]


@intrinsic
def multiply_qk(
    typingctx: Any,
    rows: Any,
    scores: Any,
    q: Any,
    q_stride: Any,
    places: Any,
    stride: Any,
    n: Any,
    element: Any,
) -> Any:
    """Compute scores[:rows, :SPAN] = q[:rows, :n] @ keys[:n, :SPAN].

    `rows` is 1 to SHORT, or TALL; `n` is at least 1. `scores` and `q` are addresses. `places` is the address
    of an array of 2 * GROUPS addresses: those of the keys' vectors, then those of the vectors to prefetch.
    Strides are the bytes from one row of q or keys to the next. `element` is a value of the keys' type."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        prefer_512_bits(b)
        a = _QkArgs._make((*args[1:-1], element))
        _for_rows(b, args[0], GROUPS, lambda *tile: _build_qk(b, a, *tile))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i, element), generate


def _build_qk(b: Any, a: _QkArgs, rows: int, first: int, width: int) -> None:
    bases, ahead = (
        [b.load(pointer_to(b, I64, a.places, I64(8 * v))) for v in range(begin, begin + width)]
        for begin in (first, first + GROUPS)
    )
    starts = [b.add(a.q, b.mul(I64(r), a.q_stride)) for r in range(rows)]

    def build(k: Any, sums: list[Any]) -> list[Any]:
        row, column = b.mul(k, a.stride), b.mul(k, I64(4))
        if rows <= SHORT:
            _prefetch_keys(b, ahead, k, row, a.dtype)
        loaded = [load_cached(b, base, row, a.dtype) for base in bases]
        return _products(b, sums, [load_broadcast(b, start, column) for start in starts], loaded)

    results = loop(b, a.n, [ZERO] * (rows * width), build)
    for i, result in enumerate(results):
        r, v = divmod(i, width)
        store(b, result, a.scores, I64(4 * (r * SPAN + (first + v) * LANES)))


def _prefetch_keys(b: Any, ahead: list[Any], k: Any, row: Any, dtype: Any) -> None:
    """Prefetch row `k` of the next keys.

    A vector of 16-bit elements is half a cache line, so each row fetches only every other vector, in
    turns."""
    if dtype == types.float32 or len(ahead) == 1:
        chosen = ahead
    else:
        is_odd = b.trunc(k, I1)
        chosen = [b.select(is_odd, odd, even) for even, odd in zip(ahead[::2], ahead[1::2], strict=True)]
    for base in chosen:
        prefetch(b, base, row)


def _add_pv(num_vectors: int) -> Any:
    """Build a function for kernels that computes
    sums[:rows, : num_vectors * LANES] += weights[:rows, :n] @ values[:n, : num_vectors * LANES].

    Its arguments: `rows`, 1 to SHORT, or TALL; `sums`, an address, and `sums_stride`, the bytes from one row
    to the next; `weights`, the address of [rows, SPAN]; `places`, the address of an array of 2 * GROUPS
    addresses: one for every LANES rows of values, then those of the rows to prefetch; `column`, the bytes
    from such an address to the first column; `stride`, the bytes from one row to the next; `n`, 1 to SPAN;
    and `element`, a value of the values' type."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        prefer_512_bits(b)
        a = _PvArgs._make((*args[1:-1], signature.args[-1]))
        _for_rows(b, args[0], num_vectors, lambda *tile: _build_pv(b, a, *tile))
        return context.get_dummy_value()

    def product(
        typingctx: Any,
        rows: Any,
        sums: Any,
        sums_stride: Any,
        weights: Any,
        places: Any,
        column: Any,
        stride: Any,
        n: Any,
        element: Any,
    ) -> Any:
        i = types.int64
        return types.void(i, i, i, i, i, i, i, i, element), generate

    return intrinsic(product)


def _build_pv(b: Any, a: _PvArgs, rows: int, first: int, width: int) -> None:
    size = a.dtype.bitwidth // 8 * LANES
    cells = [(r, 4 * LANES * (first + v)) for r in range(rows) for v in range(width)]
    results = [b.add(b.mul(I64(r), a.sums_stride), I64(offset)) for r, offset in cells]
    column = b.add(a.column, I64(first * size))

    def build_group(j: Any, group_sums: list[Any]) -> list[Any]:
        begin, place = b.mul(j, I64(LANES)), b.add(a.places, b.mul(j, I64(8)))
        base = b.add(b.load(pointer_to(b, I64, place)), column)
        ahead = b.add(b.load(pointer_to(b, I64, place, I64(8 * GROUPS))), column)

        def build(k: Any, sums: list[Any]) -> list[Any]:
            row, weight = b.mul(k, a.stride), b.mul(b.add(begin, k), I64(4))
            for skip in range(0, width * size if rows <= SHORT else 0, LINE):
                prefetch(b, ahead, b.add(row, I64(skip)))
            loaded = [load_cached(b, base, b.add(row, I64(v * size)), a.dtype) for v in range(width)]
            offsets = [b.add(weight, I64(4 * SPAN * r)) for r in range(rows)]
            return _products(b, sums, [load_broadcast(b, a.weights, x) for x in offsets], loaded)

        left = b.sub(a.n, begin)
        return loop(b, b.select(b.icmp_signed("<", left, I64(LANES)), left, I64(LANES)), group_sums, build)

    groups = b.sdiv(b.add(a.n, I64(LANES - 1)), I64(LANES))
    initial = [load(b, a.sums, offset) for offset in results]
    for offset, result in zip(results, loop(b, groups, initial, build_group), strict=True):
        store(b, result, a.sums, offset)


add_pv_4_vectors, add_pv_1_vector = _add_pv(4), _add_pv(1)
