"""Scores and online softmax of the attention kernels, and their common arguments."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda.functions.float8 import FLOAT8_TYPES, Float8Form, read_float8
from tgis.shard.memory.kv_cache import CacheScale

# Factor of scores, because the hardware computes powers of 2.
LOG2_E = tl.constexpr(1.4426950408889634)


class Sizes(NamedTuple):
    """Constants of an attention kernel."""

    group: int  # query heads per key/value head
    num_kv_heads: int
    head_dim: int
    block_size: int
    width: int  # head_dim, padded to a power of 2
    rows: int  # rows per program: queries times heads
    keys: int  # keys per block
    float8: Float8Form | None = None  # type of keys and values, if it has 8 bits


class ScoreArguments(NamedTuple):
    """`Scoring` of a kernel. Fields that are None are omitted from the compiled code."""

    scale: float
    soft_cap: float | None
    slopes: Tensor | None
    bias: Tensor | None
    reach: int
    window: int | None
    chunk: int | None
    sinks: Tensor | None
    value_scale: float | None  # factor of values of 8 bits

    @classmethod
    def of(cls, scoring: Scoring, keys: Tensor, stored: CacheScale) -> "ScoreArguments":
        """Return the arguments for keys that are stored with these divisors."""
        assert scoring.scale > 0, "a positive scale keeps the order of products"
        assert not scoring.first_key, "only speculators have such caches, and they run on CPUs"
        reach = 0 if scoring.bias is None else scoring.bias.shape[1] // 2
        optional = scoring.soft_cap or None, scoring.slopes, scoring.bias
        limits = scoring.window or None, scoring.chunk or None
        if keys.dtype not in FLOAT8_TYPES:
            return cls(scoring.scale, *optional, reach, *limits, scoring.sinks, None)
        scale = scoring.scale * stored.key
        return cls(scale, *optional, reach, *limits, scoring.sinks, stored.value)


def are_addressable(q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor) -> bool:
    """Return True if the tensors have the strides that kernels assume."""
    assert keys.dtype == values.dtype
    assert keys.dtype in (q.dtype, *FLOAT8_TYPES), "keys have the type of queries or 8 bits"
    assert keys.shape == values.shape
    return all(x.is_contiguous() for x in (q, keys, values)) and block_tables.stride(1) == 1


@triton.jit
def tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * (2 * LOG2_E)))


@triton.jit
def adjust(products, distance, heads, slope, score):
    """Return scores times LOG2_E, [rows, keys]. heads, slope: [rows]."""
    if score.soft_cap is None:
        scores = products * (score.scale * LOG2_E)
    else:
        scores = tanh(products * (score.scale / score.soft_cap)) * (score.soft_cap * LOG2_E)
    if score.slopes is not None:
        scores += (slope * LOG2_E)[:, None] * distance
    if score.bias is not None:
        place = tl.minimum(tl.maximum(distance, -score.reach), score.reach) + score.reach
        scores += tl.load(score.bias + (heads * (2 * score.reach + 1))[:, None] + place) * LOG2_E
    return scores


@triton.jit
def begin_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the initial state of a softmax: maxima, sums of weights, and weighted sums of values."""
    none = tl.full((ROWS,), -float("inf"), tl.float32)
    return none, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def add_keys(state, scores, factor, v, MASKED: tl.constexpr):
    """Return the state after one more block of keys with scores * factor, [rows, keys]."""
    best, mass, acc = state
    # The factor and the subtraction are one instruction.
    top = tl.maximum(best, tl.max(scores, 1) * factor)
    base = top
    if MASKED:  # all keys so far may be hidden
        base = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(best - base)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return top, mass * shrink + tl.sum(p, 1), acc


@triton.jit
def add_sinks(mass, best, sinks, heads):
    """Return the sums of weights, relative to the maxima `best`, with those of the heads' sinks."""
    # The limit keeps sums finite if the maximum is much smaller or no key is visible.
    return mass + tl.exp2(tl.minimum(tl.load(sinks + heads) * LOG2_E - best, 126.0))


@triton.jit
def attend_span(
    state, q, pages, rows, span, score, SIZES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr
):
    """Return the state after the keys of a span, block by block. q: [rows, width].

    pages: keys and values of the head in page 0, and the sequence's block table. rows: positions and heads,
    [rows]. span: begin and end of the blocks, and begin and end of the keys that any row attends to. Without
    MASKED, every row attends to all keys of the span."""
    keys, values, block_table = pages
    position, heads = rows
    begin, end, first, last = span
    page_stride: tl.constexpr = SIZES.num_kv_heads * SIZES.block_size * SIZES.head_dim
    slope = None
    if score.slopes is not None:
        slope = tl.load(score.slopes + heads)
    at, channel = tl.arange(0, SIZES.keys), tl.arange(0, SIZES.width)
    # Pages are looked up one block ahead, so that keys and values can be loaded several blocks ahead.
    page = tl.load(block_table + (begin + at) // SIZES.block_size, mask=begin + at < last, other=0)
    for start in tl.range(begin, end, SIZES.keys):
        key = start + at
        place = page.to(tl.int64) * page_stride + (key % SIZES.block_size) * SIZES.head_dim
        place = place[:, None] + channel[None, :]
        is_seen = (key >= first) & (key < last)
        is_read = (channel < SIZES.head_dim)[None, :]
        if MASKED:
            is_read = is_read & is_seen[:, None]
        k = tl.load(keys + place, mask=is_read, other=0.0)  # [keys, width]
        v = tl.load(values + place, mask=is_read, other=0.0)
        if SIZES.float8 is not None:
            k = read_float8(k, SIZES.float8, q.dtype)
            v = read_float8(v, SIZES.float8, q.dtype)
        following = key + SIZES.keys
        page = tl.load(block_table + following // SIZES.block_size, mask=following < last, other=0)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [rows, keys]
        distance = key[None, :] - position[:, None]
        factor = 1.0
        if score.soft_cap is None and score.slopes is None and score.bias is None:
            factor = score.scale * LOG2_E
        else:
            scores = adjust(scores, distance, heads, slope, score)
        if MASKED:
            scores = hide(scores, is_seen, distance, position, score, CAUSAL)
        state = add_keys(state, scores, factor, v, MASKED)
    return state


@triton.jit
def hide(scores, is_seen, distance, position, score, CAUSAL: tl.constexpr):
    is_hidden = ~is_seen[None, :]
    if CAUSAL:
        is_hidden = is_hidden | (distance > 0)
    if score.window is not None:
        is_hidden = is_hidden | (distance <= -score.window)
    if score.chunk is not None:
        is_hidden = is_hidden | (distance < -(position % score.chunk)[:, None])
    return tl.where(is_hidden, -float("inf"), scores)
