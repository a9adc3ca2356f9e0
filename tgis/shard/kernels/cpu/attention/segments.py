"""Segments of keys. The softmax of a row is computed for each segment, and the results are merged in the
order of segments. So a row's bits are the same whether one unit of work computes all segments or each segment
is a unit.

A result has the sums of a row (see `Scratch`) and a vector that begins with the maximum to which the sums are
relative. In the first result of a tile's first row, this vector also holds the counter of finished
segments."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.attention.softmax import merge_results
from tgis.shard.kernels.cpu.jit.compiler import atomic_add, pointer, reorderable
from tgis.shard.kernels.cpu.jit.vectors import LANES, peek, poke

EXTRA = 2 * LANES  # float32 values of a result besides the sums of values: sums of weights, and the maximum

_F32, _I64 = np.float32(0), np.int64(0)


class SegmentPart(NamedTuple):
    """Segments of a tile that a unit of work computes."""

    tile_end: int  # end of the keys that any row of the tile attends to
    segment_len: int
    num_parts: int  # number of units into which the tile is split; 1: this unit computes all segments
    number: int  # number of this unit among them
    partials: int  # address of the partial results of a split tile


# Counts a finished segment. Writes of all threads are visible to the thread that counts the last one.
_count = atomic_add(1, "acq_rel")


@reorderable
def result_size(length: int) -> int:
    """Return the number of float32 values of a result with `length` sums."""
    return length + LANES


@reorderable
def find_first_key(position: Any, scoring: Any) -> Any:
    """Return the first key that the token at a position attends to."""
    if scoring.window < 0:
        return max(position - position % -scoring.window, scoring.first_key)
    return max(position - scoring.window + 1, scoring.first_key) if scoring.window else scoring.first_key


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
    """Merge row `r` of a segment into `result`, which holds all earlier segments.

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
    """Return the address of the partial result of row `r` of a segment."""
    token = r // u.heads
    head = u.head + r % u.heads
    return part.partials + 4 * result_size(length) * ((segment * u.num_tokens + token) * num_heads + head)


@reorderable
def keep_partials(u: Any, part: SegmentPart, num_heads: int, s: Any) -> Any:
    """Store the partial results of a unit. Return True if it is the last unit of its tile to finish."""
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
    """Merge the partial results of a tile into `s.results` in the order of segments."""
    for r in range(u.num_tokens * u.heads):
        result = s.results + 4 * result_size(s.length) * r
        for segment in range(part.num_parts):
            place = partial_address(segment, r, u, part, num_heads, s.length)
            add_segment(result, segment, r, place, place + 4 * s.length, u, part, scoring, s.length)
