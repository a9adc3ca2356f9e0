"""Attention's two products, vectorised by hand: rows and keys give scores, weights and values give sums.

They take up to four vectors of columns at four places of their own, so that a span of keys need not lie
together, and keep their results in registers. Each is one chain of fused multiply-adds, along the head's
channels or along the keys, so its bits depend on its own row and column alone, whatever is taken along."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import types

from tgis.shard.kernels.cpu.attention.vectors import (
    LANES,
    constant,
    has_avx512,
    load,
    load_everywhere,
    load_lanes,
    store,
    use_widest,
)
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I1, I64, at, loop, prefetch

GROUPS = 4
SPAN = GROUPS * LANES  # keys whose scores become weights together
TALL, SHORT = 6, 4  # rows that a product takes at most: of many, and of few
LINE = 64

_TILES = (1, 2, 3, 4, TALL)  # rows
# Vectors that fit the registers as results.
_ROOM = 24 if has_avx512() else 6


class ScoresCall(NamedTuple):
    """Arguments of `multiply_keys` but the first; dtype is numba's."""

    scores: Any
    q: Any
    q_stride: Any
    places: Any
    stride: Any
    n: Any
    dtype: Any


class SumsCall(NamedTuple):
    """Arguments of `add_4_vectors` and `add_1_vector` but the first; dtype is numba's."""

    sums: Any
    sums_stride: Any
    weights: Any
    places: Any
    column: Any
    stride: Any
    n: Any
    dtype: Any


def _width(num_rows: int, num_vectors: int) -> int:
    """Of those vectors, as many as so many rows take at once."""
    return next(n for n in (4, 2, 1) if n <= num_vectors and num_rows * n <= _ROOM)


def _for_rows(b: Any, rows: Any, num_vectors: int, build: Callable[[int, int, int], None]) -> None:
    """build(number of rows, first vector, number of vectors) for all vectors, as `rows` is one of _TILES."""
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
    """sums[r * len(loaded) + v] += factors[r] * loaded[v]"""
    products = [b.fmul(factor, x, **FUSED) for factor in factors for x in loaded]
    return [b.fadd(total, more, **FUSED) for total, more in zip(sums, products, strict=True)]


@intrinsic
def multiply_keys(
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
    """In a kernel: scores[:rows, :SPAN] = q[:rows, :n] @ keys[:n, :SPAN].

    rows is 1 to SHORT, or TALL, and n at least 1. `scores` and `q` are addresses; `places` is where those of
    the keys' vectors are, and GROUPS behind them those of what is to be fetched ahead. Strides are the bytes
    from one row of q or keys to the next; `element` is a value of the keys' type."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        use_widest(b)
        call = ScoresCall._make((*args[1:-1], element))
        _for_rows(b, args[0], GROUPS, lambda *tile: _build_scores(b, call, *tile))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i, element), generate


def _build_scores(b: Any, call: ScoresCall, rows: int, first: int, width: int) -> None:
    bases, ahead = (
        [b.load(at(b, call.places, I64(8 * v), I64)) for v in range(begin, begin + width)]
        for begin in (first, first + GROUPS)
    )
    starts = [b.add(call.q, b.mul(I64(r), call.q_stride)) for r in range(rows)]

    def build(k: Any, sums: list[Any]) -> list[Any]:
        row, column = b.mul(k, call.stride), b.mul(k, I64(4))
        if rows <= SHORT:
            _fetch_keys(b, ahead, k, row, call.dtype)
        loaded = [load_lanes(b, base, row, call.dtype) for base in bases]
        return _products(b, sums, [load_everywhere(b, start, column) for start in starts], loaded)

    results = loop(b, call.n, [constant(0.0)] * (rows * width), build)
    for i, result in enumerate(results):
        r, v = divmod(i, width)
        store(b, result, call.scores, I64(4 * (r * SPAN + (first + v) * LANES)))


def _fetch_keys(b: Any, ahead: list[Any], k: Any, row: Any, dtype: Any) -> None:
    """Vectors of 16 bits an element are half a line each, so every other one is left out in turns."""
    if dtype == types.float32 or len(ahead) == 1:
        chosen = ahead
    else:
        is_odd = b.trunc(k, I1)
        chosen = [b.select(is_odd, odd, even) for even, odd in zip(ahead[::2], ahead[1::2], strict=True)]
    for base in chosen:
        prefetch(b, base, row)


def _add_values(num_vectors: int) -> Any:
    """sums[:rows, : num_vectors * LANES] += weights[:rows, :n] @ values[:n, : num_vectors * LANES].

    Arguments: rows, 1 to SHORT, or TALL; the address of sums, and the bytes from one row to the next; the
    address of weights [rows, SPAN]; where the addresses of every LANES rows of values are, and GROUPS behind
    them those of what is to be fetched ahead; the bytes from such an address to the first column, and from
    one row to the next; n, 1 to SPAN; and a value of the values' type."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        use_widest(b)
        call = SumsCall._make((*args[1:-1], signature.args[-1]))
        _for_rows(b, args[0], num_vectors, lambda *tile: _build_sums(b, call, *tile))
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


def _build_sums(b: Any, call: SumsCall, rows: int, first: int, width: int) -> None:
    size = call.dtype.bitwidth // 8 * LANES
    cells = [(r, 4 * LANES * (first + v)) for r in range(rows) for v in range(width)]
    results = [b.add(b.mul(I64(r), call.sums_stride), I64(offset)) for r, offset in cells]
    column = b.add(call.column, I64(first * size))

    def build_group(j: Any, group_sums: list[Any]) -> list[Any]:
        begin, place = b.mul(j, I64(LANES)), b.add(call.places, b.mul(j, I64(8)))
        base = b.add(b.load(at(b, place, I64(0), I64)), column)
        ahead = b.add(b.load(at(b, place, I64(8 * GROUPS), I64)), column)

        def build(k: Any, sums: list[Any]) -> list[Any]:
            row, weight = b.mul(k, call.stride), b.mul(b.add(begin, k), I64(4))
            for skip in range(0, width * size if rows <= SHORT else 0, LINE):
                prefetch(b, ahead, b.add(row, I64(skip)))
            loaded = [load_lanes(b, base, b.add(row, I64(v * size)), call.dtype) for v in range(width)]
            offsets = [b.add(weight, I64(4 * SPAN * r)) for r in range(rows)]
            return _products(b, sums, [load_everywhere(b, call.weights, x) for x in offsets], loaded)

        left = b.sub(call.n, begin)
        return loop(b, b.select(b.icmp_signed("<", left, I64(LANES)), left, I64(LANES)), group_sums, build)

    groups = b.sdiv(b.add(call.n, I64(LANES - 1)), I64(LANES))
    initial = [load(b, call.sums, offset) for offset in results]
    for offset, result in zip(results, loop(b, groups, initial, build_group), strict=True):
        store(b, result, call.sums, offset)


add_4_vectors, add_1_vector = _add_values(4), _add_values(1)
