"""Segments of keys. A row's softmax is computed for each segment of its keys alone, and the segments' results
are merged in their order. So it makes no difference to a row's bits whether one unit of work goes through all
segments or each of them is a unit of its own.

A result is the sums of a row as `Scratch` describes them, then a vector that begins with the maximum that
they are relative to. That vector also has the counter of segments that are done, in the first result of a
tile's first row."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.attention.softmax import merge_results
from tgis.shard.kernels.cpu.attention.vectors import LANES, peek, poke
from tgis.shard.kernels.cpu.jit.compiler import atomic_add, pointer, reorderable

EXTRA = 2 * LANES  # float32 of a result beside the sums of values: sums of weights, and the maximum

_F32, _I64 = np.float32(0), np.int64(0)


class SegmentPart(NamedTuple):
    """The segments of a tile that a unit of work attends to."""

    tile_end: int  # no row of the tile sees this key or a later one
    segment_len: int
    num_parts: int  # number of units that the tile's segments are; 1 if this one goes through all of them
    number: int  # which of those units this is
    partials: int  # address of the results of a tile whose segments are units of their own


# Counts a segment that is done. The thread that counts the last one sees what the others wrote.
_count = atomic_add(1, "acq_rel")


@reorderable
def result_size(length: int) -> int:
    """Return the number of float32 of a result with `length` sums."""
    return length + LANES


@reorderable
def find_first_key(position: Any, scoring: Any) -> Any:
    """Return the first key that a token sees."""
    return max(position - scoring.window + 1, 0) if scoring.window else 0


@reorderable
def add_segment(
    result: int,
    segment: int,
    r: int,
    sums: int,
    maximum: int,
    u: Any,
    part: SegmentPart,
    scoring: Any,
    length: int,
) -> None:
    """Add what row `r` got from a segment to `result`, which has that of all segments before.

    `result`, `sums` and `maximum` are addresses."""
    position = u.position + r // u.heads
    end = min(position + 1, part.tile_end) if scoring.causal else part.tile_end
    first = find_first_key(position, scoring) // part.segment_len
    if segment == first:
        copy_result(result, sums, maximum, length)
    elif first < segment and segment * part.segment_len < end:
        merge_results(result, sums, maximum, length)


@reorderable
def copy_result(result: int, sums: int, maximum: int, length: int) -> None:
    target = carray(pointer(result, _F32), (length,))
    source = carray(pointer(sums, _F32), (length,))
    for d in range(length):
        target[d] = source[d]
    poke(result + 4 * length, peek(maximum, _F32))


@reorderable
def partial_address(segment: int, r: int, u: Any, part: SegmentPart, num_heads: int, length: int) -> Any:
    """Return the address of the result of row `r` of a segment that is a unit of its own."""
    token = r // u.heads
    head = u.head + r % u.heads
    return part.partials + 4 * result_size(length) * ((segment * u.num_tokens + token) * num_heads + head)


@reorderable
def keep_partials(u: Any, part: SegmentPart, num_heads: int, s: Any) -> Any:
    """Keep the results of a unit that is one segment. Return True if it is the last one of its tile."""
    for r in range(u.num_tokens * u.heads if u.begin < u.end else 0):
        place = partial_address(part.number, r, u, part, num_heads, s.length)
        copy_result(place, s.sums + 4 * s.length * r, s.maxima + 4 * r, s.length)
    counter = partial_address(0, 0, u, part, num_heads, s.length) + 4 * s.length + 8
    is_last = _count(pointer(counter, _I64)) + 1 == part.num_parts
    if is_last:
        poke(counter, _I64)
    return is_last


@reorderable
def merge_partials(u: Any, part: SegmentPart, num_heads: int, scoring: Any, s: Any) -> None:
    """Merge the results of all segments of a tile in their order to `s.results`."""
    for r in range(u.num_tokens * u.heads):
        result = s.results + 4 * result_size(s.length) * r
        for segment in range(part.num_parts):
            place = partial_address(segment, r, u, part, num_heads, s.length)
            add_segment(result, segment, r, place, place + 4 * s.length, u, part, scoring, s.length)
