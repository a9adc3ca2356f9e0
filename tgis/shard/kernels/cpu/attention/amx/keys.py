"""Attention of one unit of work to a range of keys, on AMX tiles. Rows are processed in blocks of up to
TILE_ROWS, and few rows without tiles."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.amx.inner_loop import DEPTH as TILE_DEPTH
from tgis.shard.kernels.cpu.amx.inner_loop import ROWS, configure, release, write_shapes
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.attention.amx.chains import (
    FEW_ROWS,
    add_few_narrow,
    add_few_wide,
    multiply_few_queries,
    split_pairs,
)
from tgis.shard.kernels.cpu.attention.amx.products import (
    DEPTH,
    NARROW,
    WIDE,
    add_to_sums,
    multiply_pv_narrow,
    multiply_pv_wide,
    multiply_qk,
    prefetch,
)
from tgis.shard.kernels.cpu.attention.operands import TILE_PAIR, UPPER
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN
from tgis.shard.kernels.cpu.attention.segments import find_first_key
from tgis.shard.kernels.cpu.attention.softmax import (
    update_block_softmax,
    update_softmax,
)
from tgis.shard.kernels.cpu.attention.tiles import (
    adjust_rows,
    find_end,
    implement_keys,
    move_to_next_span,
    round_up,
    start_row,
    write_bounds,
)
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit.compiler import inlined, pointer, reorderable
from tgis.shard.kernels.cpu.jit.vectors import LANES, peek

ELEMENT = np.uint64(0)  # value of the type TILE_PAIR

_F32, _U32, _I64 = np.float32(0), np.uint32(0), np.int64(0)
_FIRST = np.uint32(UPPER)
_PAIRS = LANES // pairs.COLUMNS  # rows of pairs of a group's values


class TileMemory(NamedTuple):
    """Addresses in a thread's scratch memory."""

    values: int  # [SPAN / 2, head_dim] pairs
    out: int  # float32 [TILE_ROWS, head_dim]
    configuration: int


@reorderable
def _divide_memory(p: Any, s: Any) -> TileMemory:
    values = s.gathered
    out = values + 4 * (SPAN // pairs.COLUMNS) * p.head_dim
    return TileMemory(values, out, out + 4 * TILE_ROWS * p.head_dim)


@reorderable
def _copy_group(to: int, source: int, num_keys: int, size: int) -> None:
    """Copy the first `num_keys` values of a group. Clear the others, because a value that no row attends to
    may be NaN."""
    rows = carray(pointer(to, _U32), (_PAIRS, size))
    values = carray(pointer(source, _U32), (_PAIRS, size))
    for k in range(_PAIRS):
        if pairs.COLUMNS * k + 1 < num_keys:
            for d in range(size):
                rows[k, d] = values[k, d]
        elif pairs.COLUMNS * k < num_keys:
            for d in range(size):
                rows[k, d] = values[k, d] & _FIRST
        else:
            for d in range(size):
                rows[k, d] = np.uint32(0)


@reorderable
def _copy_values(span: int, u: Any, p: Any, s: Any, memory: Any) -> None:
    """Copy the values of a span to contiguous memory, because an instruction reads those of two groups."""
    for group in range(GROUPS):
        place = s.places + 8 * group
        prefetch(place + 24 * GROUPS, ROW_BYTES, p.head_dim)
        source = peek(place + 16 * GROUPS, _I64)
        to = memory.values + 4 * group * _PAIRS * p.head_dim
        _copy_group(to, source, u.end - span - group * LANES, p.head_dim)


@reorderable
def _multiply_values(steps: int, p: Any, s: Any, memory: Any) -> None:
    stride = 4 * p.head_dim
    width = WIDE * LANES
    whole = p.head_dim // width * width
    for c in range(0, whole, width):
        to, values = memory.out + 4 * c, memory.values + 4 * c
        multiply_pv_wide(memory.configuration, to, s.scores, values, stride, steps)
    for c in range(whole, p.head_dim, NARROW * LANES):
        to, values = memory.out + 4 * c, memory.values + 4 * c
        multiply_pv_narrow(memory.configuration, to, s.scores, values, stride, steps)


@reorderable
def _prefetch_keys(group: int, r: int, p: Any, s: Any) -> None:
    """Prefetch a group of the next span's keys while the first block is processed."""
    if r == 0:
        prefetch(s.places + 8 * (GROUPS + group), 4 * p.block_size, p.head_dim)


@reorderable
def _count_keys(first: int, last: int, span: int, u: Any, scoring: Any) -> Any:
    """Return the number of keys of a span up to the last one that any token from position `first` to `last`
    attends to, or 0 if they attend to none."""
    is_before_window = find_first_key(first, scoring) >= span + SPAN
    return 0 if is_before_window else max(min(find_end(last, u, scoring) - span, SPAN), 0)


@reorderable
def _attend_block(r: int, rows: int, span: int, u: Any, p: Any, scoring: Any, s: Any, memory: Any) -> None:
    """Process the span that begins at key `span` for rows [r, r + rows) of a unit."""
    first, last = u.position + r // u.heads, u.position + (r + rows - 1) // u.heads
    num_keys = _count_keys(first, last, span, u, scoring)
    if num_keys == 0:
        return
    depth = s.length - LANES
    steps = p.head_dim // DEPTH
    q = s.q + 4 * r * depth
    _prefetch_keys(0, r, p, s)
    multiply_qk(memory.configuration, s.scores, q, 4 * depth, s.places, 4 * p.block_size, steps)
    _prefetch_keys(1, r, p, s)
    if scoring.soft_cap > 0 or scoring.slopes != 0 or scoring.bias != 0:
        adjust_rows(r, rows, span, u, scoring, s)
    is_masked = find_end(first, u, scoring) - span < SPAN or find_first_key(last, scoring) > span
    num_groups = GROUPS if num_keys > SPAN // 2 else GROUPS // 2
    maxima = s.maxima + 4 * r
    sums = s.sums + 4 * s.length * r
    if is_masked:
        write_bounds(r, TILE_ROWS, span, u, scoring, s)
    bounds = s.bounds if is_masked else 0
    update_block_softmax(rows, num_groups, s.scores, maxima, s.updates, sums, s.length, bounds, s.factor)
    _prefetch_keys(2, r, p, s)
    _multiply_values(num_groups * LANES // DEPTH, p, s, memory)
    _prefetch_keys(3, r, p, s)
    add_to_sums(rows, sums, 4 * s.length, s.updates + 4 * LANES, memory.out, p.head_dim)


@reorderable
def _split_rows(rows: int, to: int, source: int, pitch: int, count: int) -> None:
    """Write `count` pairs of each row as factors. Rows are `pitch` bytes apart."""
    for r in range(rows):
        split_pairs(to + 8 * count * r, source + pitch * r, count)


@reorderable
def _attend_few_rows(span: int, rows: int, u: Any, p: Any, scoring: Any, s: Any, memory: Any) -> None:
    """Process the span that begins at key `span` for all rows of a unit, at most FEW_ROWS. The queries'
    factors are in the memory for values."""
    last = u.position + u.num_tokens - 1
    num_keys = _count_keys(u.position, last, span, u, scoring)
    if num_keys == 0:
        return
    num_groups = GROUPS if num_keys > SPAN // 2 else GROUPS // 2
    num_pairs = p.head_dim // pairs.COLUMNS
    stride = 4 * p.block_size
    multiply_few_queries(rows, num_groups, s.scores, memory.values, num_pairs, s.places, stride)
    if scoring.soft_cap > 0 or scoring.slopes != 0 or scoring.bias != 0:
        adjust_rows(0, rows, span, u, scoring, s)
    is_masked = find_end(u.position, u, scoring) - span < SPAN or find_first_key(last, scoring) > span
    if is_masked:
        write_bounds(0, rows, span, u, scoring, s)
    bounds = s.bounds if is_masked else 0
    update_softmax(rows, num_groups, s.scores, s.maxima, s.updates, s.sums, s.length, bounds, s.factor)
    _split_rows(rows, memory.out, s.scores, 4 * SPAN, SPAN // pairs.COLUMNS)
    length = 4 * s.length
    factors = s.updates + 4 * LANES
    places = s.places + 16 * GROUPS
    args = (factors, memory.out, places)
    whole = p.head_dim // (WIDE * LANES) * WIDE * LANES
    for c in range(0, whole, WIDE * LANES):
        add_few_wide(rows, s.sums + 4 * c, length, *args, 4 * c, 4 * p.head_dim, num_keys)
    for c in range(whole, p.head_dim, NARROW * LANES):
        add_few_narrow(rows, s.sums + 4 * c, length, *args, 4 * c, 4 * p.head_dim, num_keys)


@inlined
def _attend_keys(
    begin: int,
    end: int,
    height: int,
    u: Any,
    following: Any,
    queries: Any,
    p: Any,
    scoring: Any,
    s: Any,
    element: Any,
) -> None:
    """Process keys [begin, end) for all rows of a unit in blocks of TILE_ROWS rows, whatever the height."""
    memory = _divide_memory(p, s)
    num_rows = u.num_tokens * u.heads
    has_few = num_rows <= FEW_ROWS
    for r in range(num_rows if has_few else round_up(num_rows, TILE_ROWS)):
        start_row(r, u, queries, p, scoring.scale * p.key_factor, s)
    if has_few:
        pitch = 4 * (s.length - LANES)
        _split_rows(num_rows, memory.values, s.q, pitch, p.head_dim // pairs.COLUMNS)
        for span in range(begin, end, SPAN):
            move_to_next_span(span, u, following, p, s, element)
            _attend_few_rows(span, num_rows, u, p, scoring, s, memory)
        return
    write_shapes(memory.configuration, ROWS, TILE_DEPTH)
    configure(memory.configuration)
    for span in range(begin, end, SPAN):
        move_to_next_span(span, u, following, p, s, element)
        _copy_values(span, u, p, s, memory)
        for r in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - r)
            _attend_block(r, rows, span, u, p, scoring, s, memory)
    release(memory.configuration)


implement_keys(lambda element: element == TILE_PAIR, _attend_keys)
