"""Attention of one unit of work: a tile (tokens of one sequence), a KV head, query heads that share it, and
one or all segments of the tile's keys. The rows of a unit are pairs of a token and a query head.

Every row processes the keys span by span from the start of the sequence with the same arithmetic, so its bits
depend neither on other rows nor on the split of its sequence into chunks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.amx.instructions import TILE_ROWS
from tgis.shard.kernels.cpu.attention.elements.int8 import find_scales, has_scales
from tgis.shard.kernels.cpu.attention.elements.rotation import count_rotated, rotate
from tgis.shard.kernels.cpu.attention.operands import TILE_PAIR, round_query
from tgis.shard.kernels.cpu.attention.qk_pv import (
    GROUPS,
    SHORT,
    SPAN,
    TALL,
    add_pv_1_vector,
    add_pv_4_vectors,
    multiply_qk,
)
from tgis.shard.kernels.cpu.attention.scales import copy_scales, multiply_columns
from tgis.shard.kernels.cpu.attention.segments import (
    add_segment,
    find_first_key,
    keep_partials,
    merge_partials,
    result_size,
)
from tgis.shard.kernels.cpu.attention.softmax import (
    sum_lanes,
    update_softmax,
)
from tgis.shard.kernels.cpu.attention.widening import is_converted, widen_span
from tgis.shard.kernels.cpu.jit.compiler import inlined, overload_for_kernels, pointer, reorderable
from tgis.shard.kernels.cpu.jit.scalar_math import exp, tanh
from tgis.shard.kernels.cpu.jit.vectors import LANES, peek, poke
from tgis.shard.memory.kv_cache import SCALE_BYTES

MANY_ROWS = 16  # units with more rows use tiles of TALL rows
INITIAL_MAXIMUM = np.float32(-1e30)  # initial running maximum, below any score

_F32, _I32, _I64 = np.float32(0), np.int32(0), np.int64(0)


class Pages(NamedTuple):
    """One layer of the cache: addresses and sizes."""

    keys: int  # [num_blocks, num_kv_heads] pages of [head_dim, block_size]
    values: int  # [num_blocks, num_kv_heads] pages of [block_size, head_dim]
    num_kv_heads: int
    head_dim: int
    block_size: int
    width: int  # bytes of an element
    # When reading, factors of elements; when writing, factors of keys and values.
    key_factor: Any
    value_factor: Any
    columns: int  # numbers per element; a pair has two channels of a key, or a channel of two values


class ScoringArgs(NamedTuple):
    """Fields of a `Scoring` as kernel arguments. Zero means absent; a negative window is the length of
    chunks."""

    scale: Any
    soft_cap: Any
    window: int
    causal: int
    slopes: int  # address of float32 [num_heads]
    bias: int  # address of float32 [num_heads, num_biases]
    num_biases: int
    sinks: int  # address of float32 [num_heads]
    first_key: int


class Queries(NamedTuple):
    """Queries and output of a step: addresses of float32 [num_tokens, num_heads, head_dim]."""

    q: int
    out: int
    num_heads: int


class WorkUnit(NamedTuple):
    """Unit of work: `num_tokens` tokens beginning with token `start` of the step, at `position` of their
    sequence; `heads` query heads beginning with `head`; and keys [begin, end)."""

    blocks: int  # address of the sequence's block table, int32
    start: int
    num_tokens: int
    position: int
    kv_head: int
    head: int
    heads: int
    begin: int  # a multiple of SPAN
    end: int


class Scratch(NamedTuple):
    """Addresses in a thread's scratch memory, of float32 unless stated otherwise."""

    q: int  # [max_rows, depth], scaled, in the type of `factor`; depth is head_dim rounded up to vectors
    sums: int  # [max_rows, length]: weighted sums of values; the last vector sums the weights by lane
    length: int
    maxima: int  # [max_rows], running maximum of the scores
    results: int  # [max_rows, result_size(length)], merged results of segments
    updates: int  # [2, LANES], maxima of a tile's rows and factors of their sums
    bounds: int  # int32 [TILE_ROWS, 2], begin and end of each row's keys in the span
    scores: int  # [TILE_ROWS, SPAN], replaced by softmax weights in the type of `factor`
    # int64 [4, GROUPS], addresses: vectors of keys of the current and of the prefetched span, then one for
    # every LANES rows of values of both. Two more such arrays follow: for widened copies, and for scales.
    places: int
    scales: int  # [2, SPAN], scales of the span's keys and values; 0 if they have none
    # Copies of keys [head_dim, SPAN] and of values [SPAN, depth] if pages are not read in place.
    gathered: int
    factor: Any  # a value of the type of queries and softmax weights


@reorderable
def read_int(address: int) -> Any:
    return np.int64(peek(address, _I32))


@reorderable
def round_up(n: int, step: int) -> int:
    return (n + step - 1) // step * step


@reorderable
def page_bytes(p: Any, element: Any) -> Any:
    """Return the size of a page of keys, which is that of a page of values."""
    if has_scales(element):
        return find_scales(p) + SCALE_BYTES * p.block_size
    return p.head_dim * p.block_size * p.width // p.columns


@reorderable
def locate_span(which: int, span: int, u: Any, p: Any, s: Any, element: Any) -> None:
    """Store the addresses of a span's keys, values and scales. Those of groups that no row attends to are
    arbitrary."""
    page = page_bytes(p, element)
    for group in range(GROUPS):
        key = span + group * LANES
        if key >= u.end:
            key = span if span < u.end else 0
        index = key // p.block_size
        block = read_int(u.blocks + 4 * index)
        base = (block * p.num_kv_heads + u.kv_head) * page
        offset = (key - index * p.block_size) * p.width
        place = s.places + 8 * (which * GROUPS + group)
        poke(place, p.keys + base + offset)
        poke(place + 16 * GROUPS, p.values + base + offset * p.head_dim // p.columns)
        if has_scales(element):
            scales = base + find_scales(p) + SCALE_BYTES * offset
            poke(place + 64 * GROUPS, p.keys + scales)
            poke(place + 80 * GROUPS, p.values + scales)


@reorderable
def _locate_next_span(span: int, u: Any, following: Any, p: Any, s: Any, element: Any) -> None:
    """Store the addresses of the span to prefetch: the next span, or the first one of the `following`
    unit."""
    if span < u.end:
        locate_span(1, span, u, p, s, element)
    else:
        locate_span(1, following.begin, following, p, s, element)


@reorderable
def _advance(places: int) -> None:
    """Move the addresses of the next span to the current span."""
    for group in range(GROUPS):
        place = places + 8 * group
        poke(place, peek(place + 8 * GROUPS, _I64))
        poke(place + 16 * GROUPS, peek(place + 24 * GROUPS, _I64))


@reorderable
def move_to_next_span(span: int, u: Any, following: Any, p: Any, s: Any, element: Any) -> None:
    """Make the span at `span` the current one, and locate the one to prefetch."""
    _advance(s.places)
    if has_scales(element):
        _advance(s.places + 64 * GROUPS)
    _locate_next_span(span + SPAN, u, following, p, s, element)
    if has_scales(element):
        copy_scales(s.scales, s.places + 64 * GROUPS)


@reorderable
def _gather(span: int, u: Any, p: Any, s: Any, element: Any) -> None:
    """Copy a span to contiguous memory, from pages that do not hold a whole number of vectors."""
    page = page_bytes(p, element)
    depth = s.length - LANES
    gathered = carray(pointer(s.gathered, element), (SPAN * (p.head_dim + depth),))
    begin = p.head_dim * SPAN
    for j in range(min(SPAN, u.end - span)):
        block = read_int(u.blocks + 4 * ((span + j) // p.block_size))
        base = (block * p.num_kv_heads + u.kv_head) * page
        offset = (span + j) % p.block_size
        keys = carray(pointer(p.keys + base, element), (p.head_dim, p.block_size))
        values = carray(pointer(p.values + base, element), (p.block_size, p.head_dim))
        for d in range(p.head_dim):
            gathered[d * SPAN + j] = keys[d, offset]
            gathered[begin + j * depth + d] = values[offset, d]
        if has_scales(element):
            scales = base + find_scales(p) + SCALE_BYTES * offset
            poke(s.scales + 4 * j, peek(p.keys + scales, _F32))
            poke(s.scales + 4 * (SPAN + j), peek(p.values + scales, _F32))
    for group in range(GROUPS):
        place = s.places + 8 * group
        for ahead in range(2):
            poke(place + 8 * ahead * GROUPS, s.gathered + group * LANES * p.width)
            values_place = s.gathered + (begin + group * LANES * depth) * p.width
            poke(place + 8 * (2 + ahead) * GROUPS, values_place)


@reorderable
def _use_widened(p: Any, s: Any) -> tuple[Pages, Scratch]:
    """Return pages and scratch memory that refer to the copies of `widen_span`."""
    values = p.head_dim * SPAN
    depth = s.length - LANES
    places = s.places + 32 * GROUPS
    for group in range(GROUPS):
        poke(places + 8 * group, s.gathered + 4 * group * LANES)
        poke(places + 8 * (2 * GROUPS + group), s.gathered + 4 * (values + group * LANES * depth))
    pages = Pages(p.keys, p.values, p.num_kv_heads, p.head_dim, 1, 4, p.key_factor, p.value_factor, 1)
    rows = (s.q, s.sums, s.length, s.maxima, s.results, s.updates, s.bounds, s.scores)
    return pages, Scratch(*rows, places, s.scales, s.gathered, s.factor)


@reorderable
def _adjust_scores(address: int, scoring: Any, head: int, distance: int) -> None:
    """Apply soft cap, slope and bias to a row of scores. `distance` belongs to the span's first key."""
    scores = carray(pointer(address, _F32), (SPAN,))
    if scoring.soft_cap > 0:
        for c in range(SPAN):
            scores[c] = scoring.soft_cap * tanh(scores[c] / scoring.soft_cap)
    if scoring.slopes:
        slope = peek(scoring.slopes + 4 * head, _F32)
        for c in range(SPAN):
            scores[c] += slope * np.float32(distance + c)
    if scoring.bias:
        bias = carray(pointer(scoring.bias + 4 * head * scoring.num_biases, _F32), (scoring.num_biases,))
        reach = scoring.num_biases // 2
        for c in range(SPAN):
            scores[c] += bias[min(max(distance + c, -reach), reach) + reach]


@reorderable
def find_end(position: int, u: Any, scoring: Any) -> Any:
    """Return the end of the keys that the token at a position attends to."""
    return min(position + 1, u.end) if scoring.causal else u.end


@reorderable
def adjust_rows(r: int, rows: int, span: int, u: Any, scoring: Any, s: Any) -> None:
    for i in range(rows):
        token, head = (r + i) // u.heads, (r + i) % u.heads
        _adjust_scores(s.scores + 4 * SPAN * i, scoring, u.head + head, span - u.position - token)


@reorderable
def write_bounds(r: int, rows: int, span: int, u: Any, scoring: Any, s: Any) -> None:
    """Write the bounds of the keys that rows [r, r + rows) attend to in the span that begins at `span`."""
    bounds = carray(pointer(s.bounds, _I32), (TILE_ROWS, 2))
    token, head = r // u.heads, r % u.heads
    for i in range(rows):
        position = u.position + min(token, u.num_tokens - 1)
        end = max(min(find_end(position, u, scoring) - span, SPAN), 0)
        bounds[i, 0] = min(max(find_first_key(position, scoring) - span, 0), end)
        bounds[i, 1] = end
        head += 1
        if head == u.heads:
            token += 1
            head = 0


@inlined
def _add_values(rows: int, num_keys: int, sums: int, in_place: bool, p: Any, s: Any, element: Any) -> None:
    """Add the first `num_keys` values of the span, times the weights of a tile's rows, to the rows' sums."""
    depth = s.length - LANES
    length = 4 * s.length
    factors, places = s.updates + 4 * LANES, s.places + 16 * GROUPS
    stride = (p.head_dim if in_place else depth) * p.width
    whole = depth // SPAN * SPAN
    args = (factors, s.scores, places)
    for c in range(0, whole, SPAN):
        add_pv_4_vectors(rows, sums + 4 * c, length, *args, c * p.width, stride, num_keys, element)
    for c in range(whole, depth, LANES):
        add_pv_1_vector(rows, sums + 4 * c, length, *args, c * p.width, stride, num_keys, element)


@reorderable
def _attend_span(r: int, rows: int, span: int, u: Any, p: Any, scoring: Any, s: Any, element: Any) -> None:
    """Process the span that begins at key `span` for rows [r, r + rows) of a unit."""
    first = u.position + r // u.heads
    last = u.position + min((r + rows - 1) // u.heads, u.num_tokens - 1)
    num_keys = min(find_end(last, u, scoring) - span, SPAN)  # keys up to the last one that any row attends to
    if num_keys <= 0 or find_first_key(first, scoring) >= span + SPAN:
        return
    depth = s.length - LANES
    in_place = p.block_size % LANES == 0
    stride = (p.block_size if in_place else SPAN) * p.width
    channels = p.head_dim // p.columns
    q = s.q + 4 * r * depth
    num_groups = GROUPS if num_keys > SPAN // 2 else GROUPS // 2
    multiply_qk(rows, num_groups, s.scores, q, 4 * depth, s.places, stride, channels, element)
    if s.scales:
        multiply_columns(rows, num_groups, s.scores, s.scales)
    if scoring.soft_cap > 0 or scoring.slopes != 0 or scoring.bias != 0:
        adjust_rows(r, rows, span, u, scoring, s)
    maxima = s.maxima + 4 * r
    sums = s.sums + 4 * s.length * r
    is_masked = find_end(first, u, scoring) - span < SPAN or find_first_key(last, scoring) > span
    if is_masked:
        write_bounds(r, rows, span, u, scoring, s)
    bounds = s.bounds if is_masked else 0
    update_softmax(rows, num_groups, s.scores, maxima, s.updates, sums, s.length, bounds, s.factor)
    if s.scales:
        multiply_columns(rows, num_groups, s.scores, s.scales + 4 * SPAN)
    _add_values(rows, num_keys, sums, in_place, p, s, element)


@reorderable
def start_row(r: int, u: Any, queries: Any, p: Any, scale: Any, s: Any) -> None:
    """Scale, rotate and round the query of row `r` and clear its sums. Rows after the last token repeat it.
    Queries are rotated if keys are."""
    token = min(r // u.heads, u.num_tokens - 1)
    index = (u.start + token) * queries.num_heads + u.head + r % u.heads
    q = carray(pointer(queries.q + 4 * index * p.head_dim, _F32), (p.head_dim,))
    scaled_query = s.q + 4 * r * (s.length - LANES)
    scaled = carray(pointer(scaled_query, _F32), (p.head_dim,))
    sums = carray(pointer(s.sums + 4 * r * s.length, _F32), (s.length,))
    for d in range(p.head_dim):
        scaled[d] = q[d] * scale
    if s.scales:
        rotate(scaled_query, p.head_dim)
    round_query(scaled_query, p.head_dim, s.factor)
    for d in range(s.length):
        sums[d] = np.float32(0)
    poke(s.maxima + 4 * r, INITIAL_MAXIMUM)


@reorderable
def _finish_row(
    r: int, sums: int, maximum: int, u: Any, queries: Any, p: Any, sinks: int, length: int
) -> None:
    """Write the result of row `r` to the step's output. `sums` and `maximum` are the addresses of its sums
    and of the maximum to which they are relative."""
    head = u.head + r % u.heads
    index = (u.start + r // u.heads) * queries.num_heads + head
    out = carray(pointer(queries.out + 4 * index * p.head_dim, _F32), (p.head_dim,))
    values = carray(pointer(sums, _F32), (p.head_dim,))
    weight_sum = sum_lanes(sums + 4 * (length - LANES))
    if sinks:
        weight_sum += exp(peek(sinks + 4 * head, _F32) - peek(maximum, _F32))
    factor = p.value_factor / weight_sum if weight_sum != 0 else np.float32(0)
    for d in range(p.head_dim):
        out[d] = values[d] * factor


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
    """Process keys [begin, end) for all rows of a unit in tiles of `height` rows."""
    num_rows = u.num_tokens * u.heads
    in_place = p.block_size % LANES == 0
    scale = scoring.scale * p.key_factor
    if s.scales:
        scale /= np.float32(count_rotated(p.head_dim))
    for r in range(round_up(num_rows, height)):
        start_row(r, u, queries, p, scale, s)
    is_widened = in_place and height == TALL and is_converted(element)
    wide_pages, wide = _use_widened(p, s)
    strides = (p.block_size * p.width, p.head_dim * p.width)
    for span in range(begin, end, SPAN):
        if in_place:
            move_to_next_span(span, u, following, p, s, element)
        else:
            _gather(span, u, p, s, element)
        if is_widened:
            widen_span(s.gathered, s.places, *strides, p.head_dim, s.length - LANES, element)
            for r in range(0, num_rows, height):
                _attend_span(r, height, span, u, wide_pages, scoring, wide, _F32)
        else:
            for r in range(0, num_rows, height):
                _attend_span(r, height, span, u, p, scoring, s, element)


def attend_keys(
    begin: Any,
    end: Any,
    height: Any,
    u: Any,
    following: Any,
    queries: Any,
    p: Any,
    scoring: Any,
    s: Any,
    element: Any,
) -> None:
    """Process keys [begin, end) for all rows of a unit in tiles of up to `height` rows, by the implementation
    for the type of the cache's elements."""
    raise NotImplementedError


def implement_keys(is_for: Callable[[Any], bool], implementation: Any) -> None:
    """Let a compiled function implement `attend_keys` for elements of some types."""

    def attend(
        begin: Any,
        end: Any,
        height: Any,
        u: Any,
        following: Any,
        queries: Any,
        p: Any,
        scoring: Any,
        s: Any,
        element: Any,
    ) -> None:
        implementation(begin, end, height, u, following, queries, p, scoring, s, element)

    @overload_for_kernels(attend_keys)
    def choose(
        begin: Any,
        end: Any,
        height: Any,
        u: Any,
        following: Any,
        queries: Any,
        p: Any,
        scoring: Any,
        s: Any,
        element: Any,
    ) -> Any:
        return attend if is_for(element) else None


implement_keys(lambda element: element != TILE_PAIR, _attend_keys)


@inlined
def _attend_segments(
    height: int,
    u: Any,
    following: Any,
    queries: Any,
    part: Any,
    p: Any,
    scoring: Any,
    s: Any,
    element: Any,
) -> None:
    """Process the segments of a unit's keys one after the other. If the unit has several, they are merged
    into `s.results`."""
    is_merged = part.num_parts == 1 and u.end > part.segment_len
    begin = u.begin
    while True:
        segment = begin // part.segment_len
        end = min(u.end, (segment + 1) * part.segment_len)
        attend_keys(begin, end, height, u, following, queries, p, scoring, s, element)
        if is_merged:
            for r in range(u.num_tokens * u.heads):
                result = s.results + 4 * r * result_size(s.length)
                sums = s.sums + 4 * r * s.length
                add_segment(result, segment, r, sums, s.maxima + 4 * r, u, part, scoring, s.length)
        begin = end
        if begin >= u.end:
            break


@inlined
def attend_unit(
    u: Any, following: Any, queries: Any, part: Any, p: Any, scoring: Any, s: Any, element: Any
) -> None:
    """Compute a unit, and prefetch the first keys and values of the `following` one."""
    num_rows = u.num_tokens * u.heads
    # Minimum number of tiles of equal height.
    num_tiles = (num_rows + SHORT - 1) // SHORT
    height = TALL if num_rows > MANY_ROWS else (num_rows + num_tiles - 1) // num_tiles
    if p.block_size % LANES == 0:
        locate_span(1, u.begin, u, p, s, element)
    _attend_segments(height, u, following, queries, part, p, scoring, s, element)
    results = s.results
    size = result_size(s.length)
    maxima = s.results + 4 * s.length
    stride = 4 * size
    if part.num_parts > 1:
        if not keep_partials(u, part, queries.num_heads, s):
            return
        merge_partials(u, part, queries.num_heads, scoring, s)
    elif u.end <= part.segment_len:
        results, size = s.sums, s.length
        maxima = s.maxima
        stride = 4
    for r in range(num_rows):
        maximum = maxima + stride * r
        _finish_row(r, results + 4 * size * r, maximum, u, queries, p, scoring.sinks, s.length)
