"""Attention of one query per sequence, split into segments of keys that are merged afterwards
(Flash-Decoding)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda import step_state
from tgis.shard.kernels.cuda.functions.float8 import Float8Form, as_bytes
from tgis.shard.kernels.cuda.functions.processors import count_processors, find_capability
from tgis.shard.kernels.cuda.functions.scoring import (
    ScoreArguments,
    Sizes,
    add_sinks,
    are_addressable,
    attend_span,
    begin_softmax,
)
from tgis.shard.kernels.cuda.step_state import Segments
from tgis.shard.kernels.portable.attention import KEYS, Piece, attend_piece
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale

NUM_WARPS, NUM_STAGES = 4, 3
REGISTERS = 1 << 16  # registers per multiprocessor
TOGETHER = 8  # segments merged at once


def max_segments(max_seq_len: int) -> int:
    """Return the maximum number of segments of a sequence of up to `max_seq_len` tokens."""
    return max(1, min(step_state.MAX_SEGMENTS, -(-max_seq_len // step_state.SEGMENT_LEN)))


def choose_sizes(group: int, keys: Tensor) -> tuple[Sizes, int]:
    """Return the sizes of a program that computes segments, and the number of programs per multiprocessor.

    A program loads two blocks of keys and values ahead, each up to 16 KB. A multiprocessor needs about 48 KB
    of loads in flight to saturate the memory bandwidth. It has shared memory and registers for the returned
    number of programs."""
    _, num_kv_heads, block_size, head_dim = keys.shape
    width = max(16, triton.next_power_of_2(head_dim))
    rows = max(16, triton.next_power_of_2(group))
    num_keys = max(16, min(64, (1 << 14) // (width * keys.element_size())))
    sizes = Sizes(group, num_kv_heads, head_dim, block_size, width, rows, num_keys, Float8Form.of(keys))
    capability = find_capability(keys.device)
    # For some numbers of heads, the compiler needs more registers than three wide programs leave.
    needs_more = width == 128 and (group == 2 or capability >= 100)
    if rows > 32 or width > 128 or needs_more or capability < 90:
        return sizes, 2
    return sizes, 4 if width <= 64 else 3


@triton.jit
def find_sequence(work_starts, work, num_seqs):
    """Return the last sequence whose segments start at or before `work`. Its length is not 0."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(work_starts + middle) <= work:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def find_first(length, window, chunk):
    """Return the first key that the last token attends to."""
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    if chunk is not None:
        first = tl.maximum(length - 1, 0) // chunk * chunk
    return first


@triton.jit
def find_length(length, SEGMENT_LEN: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """Return the length of the segments of a sequence."""
    return SEGMENT_LEN * tl.maximum(1, tl.cdiv(length, SEGMENT_LEN * MAX_SEGMENTS))


@triton.jit
def find_part(
    seq_lens, work_starts, work, num_seqs, score, SEGMENT_LEN: tl.constexpr, MAX_SEGMENTS: tl.constexpr
):
    """Return the sequence of a segment, its length, the bounds of the segment, and the first visible key."""
    seq = find_sequence(work_starts, work, num_seqs)
    length = tl.load(seq_lens + seq)
    size = find_length(length, SEGMENT_LEN, MAX_SEGMENTS)
    begin = (work - tl.load(work_starts + seq)) * size
    first = find_first(length, score.window, score.chunk)
    return seq, length, begin, tl.minimum(begin + size, length), first


# Values that change between steps, and views into other tensors: kernels must not be specialised on them.
STEP_SIZES = ["num_seqs", "num_programs", "table_stride"]
STEP_TENSORS = ["block_tables", "rows", "seq_lens", "work_starts"]


@triton.jit(do_not_specialize=STEP_SIZES, do_not_specialize_on_alignment=STEP_TENSORS)
def attend_segments_kernel(
    q,
    keys,
    values,
    block_tables,
    rows,
    seq_lens,
    work_starts,
    parts,
    num_seqs,
    num_programs,
    table_stride,
    score,
    SIZES: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
):
    """Compute segments. Programs share the list of segments evenly, so the grid does not depend on
    lengths."""
    row, channel = tl.arange(0, SIZES.rows), tl.arange(0, SIZES.width)
    is_stored = (row < SIZES.group)[:, None] & (channel < SIZES.head_dim)[None, :]
    head_stride: tl.constexpr = SIZES.block_size * SIZES.head_dim
    num_heads: tl.constexpr = SIZES.num_kv_heads * SIZES.group
    maxima, masses, sums = parts
    num_items = tl.load(work_starts + num_seqs) * SIZES.num_kv_heads
    for item in tl.range(tl.program_id(0), num_items, num_programs):
        kv_head = item % SIZES.num_kv_heads
        work = item // SIZES.num_kv_heads
        seq, length, begin, end, first = find_part(
            seq_lens, work_starts, work, num_seqs, score, SEGMENT_LEN, MAX_SEGMENTS
        )
        if first < end:  # otherwise the segment is not visible, and merge_segments_kernel does not read it
            heads = kv_head * SIZES.group + tl.minimum(row, SIZES.group - 1)
            place = (tl.cast(seq, tl.int64) * num_heads + heads)[:, None] * SIZES.head_dim + channel[None, :]
            q_rows = tl.load(q + place, mask=is_stored, other=0.0)
            table = block_tables + tl.load(rows + seq).to(tl.int64) * table_stride
            pages = keys + kv_head * head_stride, values + kv_head * head_stride, table
            queries = tl.full((SIZES.rows,), length - 1, tl.int32), heads
            span = tl.maximum(begin, first // SIZES.keys * SIZES.keys), end, first, end
            state = begin_softmax(SIZES.rows, SIZES.width)
            # No key follows the query, so a causal mask is not needed.
            state = attend_span(state, q_rows, pages, queries, span, score, SIZES, False, True)
            result = tl.cast(work, tl.int64) * num_heads + heads
            tl.store(maxima + result, state[0], mask=row < SIZES.group)
            tl.store(masses + result, state[1], mask=row < SIZES.group)
            tl.store(sums + result[:, None] * SIZES.head_dim + channel[None, :], state[2], mask=is_stored)


@triton.jit(do_not_specialize_on_alignment=STEP_TENSORS)
def merge_segments_kernel(
    seq_lens,
    work_starts,
    parts,
    out,
    window,
    chunk,
    sinks,
    value_scale,
    SIZES: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Merge the segments of one head of a sequence in order, TOGETHER at a time."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = SIZES.num_kv_heads * SIZES.group
    length, start = tl.load(seq_lens + seq), tl.load(work_starts + seq)
    count = tl.load(work_starts + seq + 1) - start
    first = find_first(length, window, chunk) // find_length(length, SEGMENT_LEN, MAX_SEGMENTS)
    maxima, masses, sums = parts
    channel = tl.arange(0, SIZES.width)
    best = -float("inf")
    mass = 0.0
    acc = tl.full((SIZES.width,), 0.0, tl.float32)
    for some in tl.range(first, count, TOGETHER):
        segment = some + tl.arange(0, TOGETHER)
        is_one = segment < count
        place = tl.cast(start + segment, tl.int64) * num_heads + head
        tops = tl.load(maxima + place, mask=is_one, other=-float("inf"))
        top = tl.maximum(best, tl.max(tops, 0))
        weights = tl.exp2(tops - top)  # [TOGETHER]
        shrink = tl.exp2(best - top)
        is_read = is_one[:, None] & (channel < SIZES.head_dim)[None, :]
        values = tl.load(sums + place[:, None] * SIZES.head_dim + channel[None, :], mask=is_read, other=0.0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        mass = mass * shrink + tl.sum(tl.load(masses + place, mask=is_one, other=0.0) * weights, 0)
        best = top
    if sinks is not None:
        mass = add_sinks(mass, best, sinks, head)
    y = acc / tl.where(mass > 0, mass, 1.0)
    if value_scale is not None:
        y *= value_scale
    place = (tl.cast(seq, tl.int64) * num_heads + head) * SIZES.head_dim + channel
    tl.store(out + place, y.to(out.dtype.element_ty), mask=channel < SIZES.head_dim)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    segments: Segments,
    max_seq_len: int,
    scoring: Scoring,
    stored: CacheScale = UNSCALED,
) -> Tensor:
    """Return the attention of q, contiguous [num_seqs, num_heads, head_dim], with the same shape and type.

    keys, values: [num_blocks, num_kv_heads, block_size, head_dim], one layer of the cache. Causal queries are
    the last tokens of their sequences; others attend to the whole sequence. No sequence is longer than
    `max_seq_len`. Keys and values may have 8 bits, with the divisors `stored`."""
    num_seqs, num_heads, head_dim = q.shape
    assert are_addressable(q, keys, values, block_tables)
    out = torch.empty_like(q)
    if not num_seqs:
        return out
    max_work = num_seqs * max_segments(max_seq_len)
    shapes = (max_work, num_heads), (max_work, num_heads), (max_work, num_heads, head_dim)
    parts = tuple(q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    sizes, per_processor = choose_sizes(num_heads // keys.shape[1], keys)
    constants = sizes, step_state.SEGMENT_LEN, step_state.MAX_SEGMENTS
    count = min(per_processor * count_processors(q.device), max_work * sizes.num_kv_heads)
    score = ScoreArguments.of(scoring, keys, stored)
    pages = as_bytes(keys), as_bytes(values), block_tables
    numbers = num_seqs, count, block_tables.stride(0)
    # The compiler may use all registers that this number of programs leaves to each thread.
    max_registers = REGISTERS // (32 * NUM_WARPS * per_processor) // 8 * 8
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "maxnreg": min(255, max_registers)}
    attend_segments_kernel[(count,)](q, *pages, *segments, parts, *numbers, score, *constants, **options)
    lengths = segments.seq_lens, segments.work_starts
    merge_segments_kernel[num_seqs, num_heads](
        *lengths,
        parts,
        out,
        score.window,
        score.chunk,
        score.sinks,
        score.value_scale,
        *constants,
        TOGETHER,
        num_warps=1,
    )
    return out


def plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    segments: Segments,
    max_seq_len: int,
    scoring: Scoring,
    stored: CacheScale = UNSCALED,
) -> Tensor:
    num_blocks = -(-max_seq_len // keys.shape[2])
    count = max(1, KEYS // max(1, max_seq_len))  # sequences computed at once
    parts = []
    for start in range(0, len(q), count):
        some = slice(start, start + count)
        lengths = segments.seq_lens[some].long().unsqueeze(1)  # [n, 1]
        blocks = block_tables[segments.rows[some].long(), :num_blocks].long()
        piece = Piece(torch.arange(len(lengths), device=q.device).unsqueeze(1), lengths - 1, lengths, blocks)
        y = attend_piece(q[some].unsqueeze(1), keys, values, piece, scoring, stored)
        parts.append(y.squeeze(1))
    return torch.cat(parts)
