"""Online softmax over one span of keys (Milakov, Gimelshein, "Online normalizer calculation for softmax",
2018), vectorised by hand so that every row has the same arithmetic. Rows that attend to all keys of a span
use code without masks, which gives the same bits: masked keys only add zeros."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.attention.operands import store_weights
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN, for_groups, for_rows
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I1, I32, I64
from tgis.shard.kernels.cpu.jit.vectors import (
    INTEGERS,
    LANES,
    ZERO,
    exp,
    load,
    multiply_add,
    prefer_512_bits,
    store,
)

_HIDDEN = llvm.constant(float("-inf"), LANES)


def _add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y, **FUSED)


def _maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _find_visible(b: Any, bounds: Any, num_groups: int) -> list[Any]:
    """Return the mask of visible keys of a row for each group. `bounds` is the address of the row's
    bounds."""
    first, end = (_load_broadcast_int(b, b.add(bounds, I64(4 * i))) for i in range(2))
    count = b.sub(end, first)
    lanes = [ir.Constant(INTEGERS, list(range(v * LANES, (v + 1) * LANES))) for v in range(num_groups)]
    return [b.icmp_unsigned("<", b.sub(lane, first), count) for lane in lanes]


def _load_broadcast_int(b: Any, address: Any) -> Any:
    return llvm.broadcast(b, b.load(llvm.pointer_to(b, I32, address), align=4), LANES)


def _find_row_maxima(b: Any, rows: list[Any]) -> Any:
    """Return the maximum of vector r in lane r, for up to LANES vectors. Other lanes are undefined."""
    for distance in (8, 4, 2, 1):
        low = [lane for lane in range(LANES) if not lane & distance]
        chosen = [lane + begin for begin in (0, LANES) for lane in low]
        pairs = [(x, rows[i + 1] if i + 1 < len(rows) else x) for i, x in enumerate(rows) if i % 2 == 0]
        rows = [
            _maximum(b, llvm.shuffle(b, x, y, chosen), llvm.shuffle(b, x, y, [c + distance for c in chosen]))
            for x, y in pairs
        ]
    return rows[0]


def _load_row(b: Any, scores: Any, num_groups: int) -> list[Any]:
    return [load(b, scores, I64(4 * LANES * v)) for v in range(num_groups)]


def _update_maxima(b: Any, tile: "_ScoreTile", rows: int) -> None:
    """Update the running maxima of a tile's rows. Write them and the factors of earlier sums to the tile's
    scratch memory. The factor of a row with an unchanged maximum is exactly 1."""
    row_maxima = []
    for r in range(rows):
        row = _load_row(b, b.add(tile.scores, I64(4 * SPAN * r)), tile.num_groups)
        if tile.bounds is not None:
            visible = _find_visible(b, b.add(tile.bounds, I64(8 * r)), tile.num_groups)
            row = [b.select(mask, x, _HIDDEN) for mask, x in zip(visible, row, strict=True)]
        row_maxima.append(reduce(lambda x, y: _maximum(b, x, y), row))
    mask = ir.Constant(ir.VectorType(I1, LANES), [int(lane < rows) for lane in range(LANES)])
    before = llvm.load_vector(b, tile.maxima, LANES, mask)
    after = _maximum(b, _find_row_maxima(b, row_maxima), before)
    llvm.store_vector(b, after, tile.maxima, mask)
    store(b, after, tile.updates, I64(0))
    store(b, exp(b, b.fsub(before, after, **FUSED)), tile.updates, I64(4 * LANES))


def _write_weights(b: Any, tile: "_ScoreTile", rows: Any) -> None:
    weight_sums = b.add(tile.sums, b.mul(b.sub(tile.length, I64(LANES)), I64(4)))

    def write_row(r: Any, _: list[Any]) -> list[Any]:
        scores = b.add(tile.scores, b.mul(r, I64(4 * SPAN)))
        update = b.add(tile.updates, b.mul(r, I64(4)))
        after, factor = (
            llvm.load_broadcast(b, b.add(update, I64(offset)), LANES) for offset in (0, 4 * LANES)
        )
        row = _load_row(b, scores, tile.num_groups)
        weights = [exp(b, b.fsub(x, after, **FUSED)) for x in row]
        if tile.bounds is not None:
            visible = _find_visible(b, b.add(tile.bounds, b.mul(r, I64(8))), tile.num_groups)
            weights = [b.select(mask, x, ZERO) for mask, x in zip(visible, weights, strict=True)]
        place = b.mul(r, b.mul(tile.length, I64(4)))
        total = store_weights(b, weights, scores, tile.element)
        earlier = load(b, weight_sums, place)
        store(b, multiply_add(b, earlier, factor, total), weight_sums, place)
        return []

    llvm.loop(b, rows, [], write_row)


class _ScoreTile(NamedTuple):
    """Arguments of `update_softmax` and `update_block_softmax` in one branch of their code."""

    scores: Any
    maxima: Any
    updates: Any
    sums: Any
    length: Any
    bounds: Any  # None: all rows attend to all keys
    num_groups: int
    element: Any


def _for_masks(b: Any, num_groups: Any, bounds: Any, build: Callable[[int, Any], None]) -> None:
    """Emit a branch over `bounds`. Each side calls build(number of groups, `bounds` or None)."""
    with b.if_else(b.icmp_unsigned("==", bounds, I64(0))) as (all_keys, some_keys):
        with all_keys:
            build(GROUPS, None)
        with some_keys:
            for_groups(b, num_groups, lambda groups: build(groups, bounds))


@llvm_function()
def update_softmax(
    b: Any,
    rows: Any,
    num_groups: Any,
    scores: Any,
    maxima: Any,
    updates: Any,
    sums: Any,
    length: Any,
    bounds: Any,
    element: Any,
) -> None:
    """Convert the scores of a tile, [rows, SPAN], to softmax weights in place. Update the rows' running
    maxima and sums of weights.

    Weights are exponentials relative to the new maximum. rows: one of TILES. scores, maxima, updates, sums:
    addresses. A row has `length` sums in whole vectors; the last vector sums the weights by lane. `updates`
    receives two vectors: the maxima, and the factors by which the caller must multiply the other sums.
    bounds: address of int32 [rows, 2], begin and end of each row's keys, or 0 if all rows attend to all keys.
    Other keys get weight 0. num_groups: GROUPS, or with bounds half of it if no row attends to later keys,
    whose scores are not read. element: a value of the weights' type (see `operands`)."""
    prefer_512_bits(b)

    def build(groups: int, bounds: Any) -> None:
        tile = _ScoreTile(scores, maxima, updates, sums, length, bounds, groups, element)
        for_rows(b, rows, lambda num_rows: _update_maxima(b, tile, num_rows))
        _write_weights(b, tile, rows)

    _for_masks(b, num_groups, bounds, build)


@llvm_function()
def update_block_softmax(
    b: Any,
    rows: Any,
    num_groups: Any,
    scores: Any,
    maxima: Any,
    updates: Any,
    sums: Any,
    length: Any,
    bounds: Any,
    element: Any,
) -> None:
    """Do the same as `update_softmax` for 1 to LANES rows. Scores of LANES rows are read, but weights and
    sums of `rows` rows are written. The maxima of rows after the last one are arbitrary."""
    prefer_512_bits(b)

    def build(groups: int, bounds: Any) -> None:
        tile = _ScoreTile(scores, maxima, updates, sums, length, bounds, groups, element)
        half = I64(LANES // 2)
        with b.if_else(b.icmp_signed("<=", rows, half)) as (few, many):
            for branch, height in ((few, LANES // 2), (many, LANES)):
                with branch:
                    _update_maxima(b, tile, height)
        _write_weights(b, tile, rows)

    _for_masks(b, num_groups, bounds, build)


@llvm_function()
def merge_results(b: Any, result: Any, sums: Any, maximum: Any, length: Any) -> None:
    """Add sums, relative to `maximum`, to those of `result`, which are followed by their own maximum.
    `length`, a multiple of LANES, is the number of sums; the other arguments are addresses."""
    prefer_512_bits(b)
    own_maximum = b.add(result, b.mul(length, I64(4)))
    own, other = (llvm.load_broadcast(b, x, LANES) for x in (own_maximum, maximum))
    after = _maximum(b, own, other)
    own_factor, factor = (exp(b, b.fsub(x, after, **FUSED)) for x in (own, other))

    def build(k: Any, values: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(4 * LANES))
        kept = b.fmul(load(b, result, offset), own_factor)
        store(b, multiply_add(b, load(b, sums, offset), factor, kept), result, offset)
        return values

    llvm.loop(b, b.sdiv(length, I64(LANES)), [], build)
    b.store(b.extract_element(after, I32(0)), llvm.pointer_to(b, FLOAT, own_maximum))


def _rotate_lanes(b: Any, x: Any, distance: int) -> Any:
    return llvm.shuffle(b, x, x, [(lane + distance) % LANES for lane in range(LANES)])


@llvm_function(types.float32)
def sum_lanes(b: Any, address: Any) -> Any:
    """Return the sum of the vector at an address, in a fixed order."""
    total = load(b, address, I64(0))
    for distance in (8, 4, 2, 1):
        total = _add(b, total, _rotate_lanes(b, total, distance))
    return b.extract_element(total, I32(0))
