"""QK and PV tiles of attention, vectorised by hand. QK multiplies queries by keys, PV softmax weights by
values.

A tile has up to four vectors of columns, each with its own address, so a span of keys need not be contiguous.
Each result stays in a register and is one chain of fused multiply-adds over the channels (QK) or keys (PV),
so its bits depend only on its row and column. A pair of bfloat16 is two channels, or two keys."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numba import types

from tgis.shard.kernels.cpu.attention.elements.float8 import find_nan
from tgis.shard.kernels.cpu.attention.operands import (
    count_columns,
    drop_later,
    load_elements,
)
from tgis.shard.kernels.cpu.gemm.pairs import add_products, load_factor
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I1, I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, ZERO, load, multiply_add, prefer_512_bits, store

GROUPS = 4
SPAN = GROUPS * LANES  # keys per update of the online softmax
TALL, SHORT = 6, 4  # maximum rows of a tile in units with many rows, and with few
LINE = 64
# Order in which successive rows prefetch vectors. A cache line may hold two vectors, of this and of the next
# row.
_TURNS = {1: (0,), 2: (0, 1), 4: (0, 2, 1, 3)}

TILES = (1, 2, 3, 4, TALL)  # numbers of rows for which tiles are compiled
# Maximum result vectors of a tile, so that all of them fit the registers.
_MAX_VECTORS = 24 if llvm.has_feature("avx512f") and llvm.has_feature("avx512vl") else 6


def _width(num_rows: int, num_vectors: int) -> int:
    """Return the number of vectors that a tile of `num_rows` rows computes at once."""
    return next(n for n in (4, 2, 1) if n <= num_vectors and num_rows * n <= _MAX_VECTORS)


def for_rows(b: Any, rows: Any, build: Callable[[int], None], counts: Sequence[int] = TILES) -> None:
    """Emit a switch over `rows`, one of `counts`. Each case calls build(number of rows)."""
    done = b.append_basic_block("done")
    blocks = [b.append_basic_block(f"rows_{n}") for n in counts]
    switch = b.switch(rows, blocks[-1])
    for n, block in zip(counts, blocks, strict=True):
        if n != counts[-1]:
            switch.add_case(I64(n), block)
        b.position_at_end(block)
        build(n)
        b.branch(done)
    b.position_at_end(done)


def for_groups(b: Any, num_groups: Any, build: Callable[[int], None]) -> None:
    """Emit a branch over `num_groups`, GROUPS or half of them. Each side calls build(number of groups)."""
    with b.if_else(b.icmp_signed("<=", num_groups, I64(GROUPS // 2))) as (half, whole):
        with half:
            build(GROUPS // 2)
        with whole:
            build(GROUPS)


def _for_vectors(b: Any, rows: Any, num_vectors: int, build: Callable[[int, int, int], None]) -> None:
    """Emit a switch over `rows`, one of TILES. Each case calls build(number of rows, first vector, number of
    vectors) until all vectors are covered."""

    def build_rows(num_rows: int) -> None:
        width = _width(num_rows, num_vectors)
        for first in range(0, num_vectors, width):
            build(num_rows, first, width)

    for_rows(b, rows, build_rows)


@llvm_function()
def multiply_qk(
    b: Any,
    rows: Any,
    num_groups: Any,
    scores: Any,
    q: Any,
    q_stride: Any,
    places: Any,
    stride: Any,
    n: Any,
    element: Any,
) -> None:
    """Compute scores[:rows, :SPAN] = q[:rows, :n] @ keys[:n, :SPAN], or only the first half of each row.

    rows: 1 to SHORT, or TALL. num_groups: GROUPS, or half of it. scores, q: addresses. places: address of
    2 * GROUPS addresses, those of the keys' vectors and then those of the vectors to prefetch. q_stride,
    stride: bytes between rows of q and of keys. n: at least 1; counts pairs if keys are pairs. element: a
    value of the keys' type."""

    def build_tile(num_rows: int, first: int, width: int) -> None:
        bases, ahead = (
            [b.load(llvm.pointer_to(b, I64, places, I64(8 * v))) for v in range(begin, begin + width)]
            for begin in (first, first + GROUPS)
        )
        starts = [b.add(q, b.mul(I64(r), q_stride)) for r in range(num_rows)]

        def add_channel(k: Any, sums: list[Any]) -> list[Any]:
            row, column = b.mul(k, stride), b.mul(k, I64(4))
            if num_rows <= SHORT:
                _prefetch_keys(b, ahead, k, row, element)
            loaded = [load_elements(b, base, row, element) for base in bases]
            factors = [load_factor(b, b.add(start, column), LANES, element) for start in starts]
            return add_products(b, sums, factors, loaded, element)

        results = llvm.loop(b, n, _first_scores(b, bases, element) * num_rows, add_channel)
        for i, result in enumerate(results):
            r, v = divmod(i, width)
            store(b, result, scores, I64(4 * (r * SPAN + (first + v) * LANES)))

    prefer_512_bits(b)
    for_groups(b, num_groups, lambda groups: _for_vectors(b, rows, groups, build_tile))


def _first_scores(b: Any, bases: list[Any], element: Any) -> list[Any]:
    """Return a vector of initial scores for each base: NaN for keys with NaN, otherwise 0."""
    return [find_nan(b, base, LANES) if element == types.int8 else ZERO for base in bases]


def _prefetch_keys(b: Any, ahead: list[Any], k: Any, row: Any, element: Any) -> None:
    """Prefetch row `k` of the next keys. A vector of 16-bit elements is half a cache line, one of 8-bit
    elements a quarter, so rows take turns in prefetching the vectors."""
    turns = min(len(ahead), {8: 4, 16: 2}.get(element.bitwidth, 1))
    for chosen in zip(*(ahead[turn::turns] for turn in _TURNS[turns]), strict=True):
        llvm.prefetch(b, _choose(b, k, chosen), row)


def _choose(b: Any, k: Any, choices: Sequence[Any]) -> Any:
    """Return the choice, of 1, 2 or 4, with the number in the lowest bits of k."""
    if len(choices) == 1:
        return choices[0]
    is_odd = b.trunc(k, I1)
    pairs = zip(choices[::2], choices[1::2], strict=True)
    return _choose(b, b.lshr(k, I64(1)), [b.select(is_odd, odd, even) for even, odd in pairs])


def _add_pv(num_vectors: int) -> Any:
    """Build a kernel function:
    sums[:rows, : num_vectors * LANES] = factors[:rows] * sums + weights[:rows, :n] @ values[:n].

    rows: 1 to SHORT, or TALL. sums, factors [rows], weights [rows, SPAN]: addresses. places: address of
    2 * GROUPS addresses, one for every LANES rows of values and then those of the rows to prefetch. column:
    bytes from such an address to the first column. sums_stride, stride: bytes between rows of sums and of
    values (or pairs of values). n: 1 to SPAN. element: a value of the values' type."""

    @llvm_function()
    def add_pv(
        b: Any,
        rows: Any,
        sums: Any,
        sums_stride: Any,
        factors: Any,
        weights: Any,
        places: Any,
        column: Any,
        stride: Any,
        n: Any,
        element: Any,
    ) -> None:
        prefer_512_bits(b)
        args = (sums, sums_stride, factors, weights, places, column, stride, n, element)
        _for_vectors(b, rows, num_vectors, lambda *tile: _build_pv(b, args, *tile))

    return add_pv


def _build_pv(b: Any, args: Any, rows: int, first: int, width: int) -> None:
    """Emit the code of a tile of `rows` rows and `width` vectors, beginning with vector `first`."""
    sums, sums_stride, growths, weights, places, column, stride, n, element = args
    size = element.bitwidth // 8 * LANES
    columns = count_columns(element)
    cells = [(r, 4 * LANES * (first + v)) for r in range(rows) for v in range(width)]
    results = [b.add(b.mul(I64(r), sums_stride), I64(offset)) for r, offset in cells]
    begin_column = b.add(column, I64(first * size))

    def add_group(j: Any, group_sums: list[Any]) -> list[Any]:
        begin = b.mul(j, I64(LANES))
        place = b.add(places, b.mul(j, I64(8)))
        first_weight = b.mul(j, I64(LANES // columns))
        base = b.add(b.load(llvm.pointer_to(b, I64, place)), begin_column)
        ahead = b.add(b.load(llvm.pointer_to(b, I64, place, I64(8 * GROUPS))), begin_column)

        def add_key(k: Any, key_sums: list[Any], is_half: bool = False) -> list[Any]:
            row = b.mul(k, stride)
            weight = b.mul(b.add(first_weight, k), I64(4))
            for skip in range(0, width * size if rows <= SHORT else 0, LINE):
                llvm.prefetch(b, ahead, b.add(row, I64(skip)))
            loaded = [load_elements(b, base, b.add(row, I64(v * size)), element) for v in range(width)]
            if is_half:
                loaded = [drop_later(b, pair) for pair in loaded]
            offsets = [b.add(weight, I64(4 * SPAN * r)) for r in range(rows)]
            factors = [load_factor(b, b.add(weights, offset), LANES, element) for offset in offsets]
            return add_products(b, key_sums, factors, loaded, element)

        left = b.sub(n, begin)
        count = b.select(b.icmp_signed("<", left, I64(LANES)), left, I64(LANES))
        if columns == 1:
            return llvm.loop(b, count, group_sums, add_key)
        whole, end = (b.udiv(x, I64(columns)) for x in (count, b.add(count, I64(columns - 1))))
        pair_sums = llvm.loop_range(b, I64(0), whole, 1, group_sums, add_key)
        # The value of a key that no row attends to may be uninitialised.
        return llvm.loop_range(b, whole, end, 1, pair_sums, partial(add_key, is_half=True))

    groups = b.sdiv(b.add(n, I64(LANES - 1)), I64(LANES))
    added = llvm.loop(b, groups, [ZERO] * len(cells), add_group)
    by_row = [llvm.load_broadcast(b, b.add(growths, I64(4 * r)), LANES) for r in range(rows)]
    for offset, (r, _), result in zip(results, cells, added, strict=True):
        store(b, multiply_add(b, load(b, sums, offset), by_row[r], result), sums, offset)


add_pv_4_vectors, add_pv_1_vector = _add_pv(4), _add_pv(1)
