"""QK and PV products of few rows, with the bits of AMX tiles, which are faster only for more rows.

For every 32 channels or keys, a tile adds the products of the first numbers of pairs in one chain of fused
multiply-adds, those of the second numbers in another, and then both to the sum. Factors are float32, those of
the upper halves of all pairs of a row before those of the lower halves."""

from typing import Any, NamedTuple

from tgis.shard.kernels.cpu.amx.instructions import TILE_ROWS
from tgis.shard.kernels.cpu.attention.operands import UPPER
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN, for_groups, for_rows
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I32, I64
from tgis.shard.kernels.cpu.jit.vectors import (
    INTEGERS,
    LANES,
    VECTOR,
    ZERO,
    load,
    multiply_add,
    prefer_512_bits,
    store,
)

FEW_ROWS = 4
_COUNTS = range(1, FEW_ROWS + 1)
_DEPTH = TILE_ROWS  # pairs of a chain
_GROUP = LANES // pairs.COLUMNS  # rows of pairs in a group of values
_WIDE, _NARROW = 4, 2  # vectors that are computed at once, so that their chains fit the registers
_HALVES = range(pairs.COLUMNS)


def _split(b: Any, loaded: Any) -> list[Any]:
    """Return the upper and lower halves of pairs as float32."""
    upper = b.and_(loaded, llvm.constant(UPPER, LANES, I32))
    lower = b.shl(loaded, llvm.constant(16, LANES, I32))
    return [b.bitcast(half, VECTOR) for half in (upper, lower)]


def _load_pairs(b: Any, address: Any) -> Any:
    return b.load(llvm.pointer_to(b, INTEGERS, address), align=4)


def _add_pair(
    b: Any, chains: list[Any], factors: list[Any], vectors: list[Any], halves: range = _HALVES
) -> list[Any]:
    """Add the products of a pair of each row with vectors of pairs to the chains, [half, row, vector].
    `factors` are the addresses of the rows' upper and lower halves, [half][row]."""
    changed = list(chains)
    count = len(factors[0]) * len(vectors)
    for v, loaded in enumerate(vectors):
        for half, numbers in zip(halves, _split(b, loaded), strict=False):
            for r, address in enumerate(factors[half]):
                i = half * count + r * len(vectors) + v
                changed[i] = multiply_add(b, numbers, llvm.load_broadcast(b, address, LANES), changed[i])
    return changed


def _add_chains(b: Any, sums: list[Any], chains: list[Any]) -> list[Any]:
    both = [b.fadd(*pair, **FUSED) for pair in zip(chains[: len(sums)], chains[len(sums) :], strict=True)]
    return [b.fadd(*pair, **FUSED) for pair in zip(sums, both, strict=True)]


@llvm_function()
def split_pairs(b: Any, to: Any, source: Any, count: Any) -> None:
    """Write `count` pairs, a multiple of LANES, as factors: the upper halves, then the lower halves."""
    prefer_512_bits(b)

    def split_vector(k: Any, _: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(4))
        for half, numbers in enumerate(_split(b, _load_pairs(b, b.add(source, offset)))):
            store(b, numbers, to, b.mul(b.add(k, b.mul(count, I64(half))), I64(4)))
        return []

    llvm.loop_range(b, I64(0), count, LANES, [], split_vector)


@llvm_function()
def multiply_few_queries(
    b: Any,
    rows: Any,
    num_groups: Any,
    scores: Any,
    q: Any,
    num_pairs: Any,
    places: Any,
    stride: Any,
) -> None:
    """Compute scores[:rows, :SPAN] = q[:rows] @ keys, or only the first half of each row.

    q: address of factors, [rows, 2, num_pairs]. places: address of 2 * GROUPS addresses, those of the keys'
    groups and then those of the groups to prefetch. stride: bytes between rows of pairs of keys."""

    def build_rows(num_rows: int, num_vectors: int) -> None:
        width = min(num_vectors, _WIDE if num_rows < FEW_ROWS else _NARROW)
        for first in range(0, num_vectors, width):
            _multiply_keys(b, num_rows, (first, width), scores, q, num_pairs, places, stride)

    prefer_512_bits(b)
    for_rows(b, rows, lambda count: for_groups(b, num_groups, lambda n: build_rows(count, n)), _COUNTS)


def _multiply_keys(
    b: Any,
    num_rows: int,
    groups: tuple[int, int],
    scores: Any,
    q: Any,
    num_pairs: Any,
    places: Any,
    stride: Any,
) -> None:
    """Emit the scores of some groups, given by the first one and their count."""
    first, width = groups
    bases, ahead = (
        [b.load(llvm.pointer_to(b, I64, places, I64(8 * (begin + v)))) for v in range(width)]
        for begin in (first, first + GROUPS)
    )
    queries = _find_halves(b, q, num_rows, num_pairs)

    def add_step(step: Any, sums: list[Any]) -> list[Any]:
        begin = b.mul(step, I64(_DEPTH))

        def add_channels(k: Any, chains: list[Any]) -> list[Any]:
            at = b.add(begin, k)
            row, column = b.mul(at, stride), b.mul(at, I64(4))
            for base in ahead:
                llvm.prefetch(b, base, row)
            vectors = [_load_pairs(b, b.add(base, row)) for base in bases]
            return _add_pair(b, chains, _move(b, queries, column), vectors)

        chains = llvm.loop(b, I64(_DEPTH), [ZERO] * (2 * len(sums)), add_channels)
        return _add_chains(b, sums, chains)

    results = llvm.loop(b, b.sdiv(num_pairs, I64(_DEPTH)), [ZERO] * (num_rows * width), add_step)
    for i, result in enumerate(results):
        r, v = divmod(i, width)
        store(b, result, scores, I64(4 * (r * SPAN + (first + v) * LANES)))


def _add_few(width: int) -> Any:
    """Build a kernel function: sums[:rows, : width * LANES] = factors[:rows] * sums + weights[:rows, :n] @
    values[:n].

    sums, factors [rows]: addresses. sums_stride: bytes between rows of sums. weights: address of factors,
    [rows, 2, SPAN / 2]. places: address of 2 * GROUPS addresses, those of the values' groups and then those
    of the groups to prefetch. column: bytes from such an address to the first column. stride: bytes between
    rows of pairs of values. n: number of keys, 1 to SPAN."""

    @llvm_function()
    def add_few(
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
    ) -> None:
        def build(num_rows: int) -> None:
            at_once = min(width, _WIDE if num_rows < FEW_ROWS else _NARROW)
            for first in range(0, width, at_once):
                offset = I64(4 * LANES * first)
                values = _Values(places, b.add(column, offset), stride, at_once, n)
                totals = _add_values(b, values, _find_halves(b, weights, num_rows, I64(SPAN // 2)))
                _add_to_sums(b, totals, b.add(sums, offset), sums_stride, factors, at_once)

        prefer_512_bits(b)
        for_rows(b, rows, build, _COUNTS)

    return add_few


class _Values(NamedTuple):
    """Columns of the values of a span. See `_add_few`."""

    places: Any
    column: Any
    stride: Any
    width: int  # in vectors
    n: Any


def _add_values(b: Any, values: _Values, weights: list[list[Any]]) -> list[Any]:
    """Emit the sums of rows and vectors."""
    num_pairs = b.udiv(b.add(values.n, I64(1)), I64(pairs.COLUMNS))
    per_step = _DEPTH // _GROUP

    def add_step(step: Any, totals: list[Any]) -> list[Any]:
        chains = [ZERO] * (2 * len(totals))
        for i in range(per_step):
            group = b.add(b.mul(step, I64(per_step)), I64(i))
            chains = _add_group(b, values, group, weights, chains)
        return _add_chains(b, totals, chains)

    num_steps = b.udiv(b.add(num_pairs, I64(_DEPTH - 1)), I64(_DEPTH))
    return llvm.loop(b, num_steps, [ZERO] * (len(weights[0]) * values.width), add_step)


def _add_group(b: Any, values: _Values, group: Any, weights: list[list[Any]], chains: list[Any]) -> list[Any]:
    """Emit the addition of a group of values to the chains."""
    place = b.add(values.places, b.mul(group, I64(8)))
    base, ahead = (
        b.add(b.load(llvm.pointer_to(b, I64, place, I64(offset))), values.column)
        for offset in (0, 8 * GROUPS)
    )
    begin = b.mul(group, I64(_GROUP))

    def add_pair(j: Any, changed: list[Any], halves: range = _HALVES) -> list[Any]:
        row = b.mul(b.sub(j, begin), values.stride)
        offset = b.mul(j, I64(4))
        columns = [b.add(row, I64(4 * LANES * v)) for v in range(values.width)]
        for column in columns:
            llvm.prefetch(b, ahead, column)
        vectors = [_load_pairs(b, b.add(base, column)) for column in columns]
        return _add_pair(b, changed, _move(b, weights, offset), vectors, halves)

    last = b.add(begin, I64(_GROUP))
    whole, end = (b.udiv(b.add(values.n, I64(extra)), I64(pairs.COLUMNS)) for extra in (0, 1))
    whole, end = (_clamp(b, count, begin, last) for count in (whole, end))
    added = llvm.loop_range(b, begin, whole, 1, chains, add_pair)
    # The second value of the last pair may be uninitialised.
    return llvm.loop_range(b, whole, end, 1, added, lambda j, changed: add_pair(j, changed, range(1)))


def _add_to_sums(b: Any, totals: list[Any], sums: Any, stride: Any, factors: Any, width: int) -> None:
    """Emit sums = factors * sums + totals."""
    for i, total in enumerate(totals):
        r, v = divmod(i, width)
        factor = llvm.load_broadcast(b, b.add(factors, I64(4 * r)), LANES)
        offset = b.add(b.mul(stride, I64(r)), I64(4 * LANES * v))
        store(b, multiply_add(b, load(b, sums, offset), factor, total), sums, offset)


def _find_halves(b: Any, factors: Any, num_rows: int, num_pairs: Any) -> list[list[Any]]:
    """Return the addresses of the upper and lower halves of each row's factors, [half][row]."""
    size = b.mul(num_pairs, I64(4))
    return [
        [b.add(factors, b.mul(size, I64(pairs.COLUMNS * r + half))) for r in range(num_rows)]
        for half in _HALVES
    ]


def _move(b: Any, addresses: list[list[Any]], offset: Any) -> list[list[Any]]:
    return [[b.add(address, offset) for address in half] for half in addresses]


def _clamp(b: Any, x: Any, low: Any, high: Any) -> Any:
    least = b.select(b.icmp_signed("<", x, high), x, high)
    return b.select(b.icmp_signed("<", least, low), low, least)


add_few_wide, add_few_narrow = _add_few(_WIDE), _add_few(_NARROW)
