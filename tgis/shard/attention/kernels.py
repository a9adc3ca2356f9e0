"""Paged attention as compiled kernels: keeping fresh keys and values, and attending to the pages in place.

A unit of work is a tile (some tokens of one sequence), a kv head and up to HEADS of the query heads that
share it; its rows are their combinations. Keys are taken a span at a time, counted from the sequence's
start, and every row meets them in the same order and arithmetic, so its bits depend neither on the rows
beside it nor on how its sequence was cut into chunks."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from tgis.shard.attention.product import ROWS, add_values, multiply_keys
from tgis.shard.compiled import Kernel, as_float, inner, pointer, take
from tgis.shard.numeric import exp, stored, tanh

HEADS = 16
SPAN = 64  # keys whose scores become weights together, if blocks are not longer
TOKENS = 8  # tokens whose keys and values are one unit of work to write
UNSEEN = np.float32(-1e30)  # the score of what a row must not see

# Values of the types that numba knows the cache's elements by.
_ELEMENTS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}
_F32, _I32, _I64 = np.float32(0), np.int32(0), np.int64(0)


class Pages(NamedTuple):
    """One layer of the cache: addresses, and sizes in elements or bytes."""

    keys: int  # [num_blocks, num_kv_heads] pages of [head_dim, columns]
    values: int  # [num_blocks, num_kv_heads] pages of [block_size, depth]
    num_kv_heads: int
    head_dim: int
    block_size: int
    columns: int  # block_size, padded
    depth: int  # head_dim, padded
    page: int  # bytes
    width: int  # bytes of an element


class Rule(NamedTuple):
    """How a score becomes a weight; zeros and empty arrays stand for what is absent."""

    scale: Any
    soft_cap: Any
    window: int
    causal: int
    slopes: Any  # [num_heads]
    bias: Any  # [num_heads, 2 * reach + 1]


class Unit(NamedTuple):
    """`num_tokens` tokens from token `start` of the step, at `position` of their sequence; `heads` heads
    from `head`."""

    sequence: int
    start: int
    num_tokens: int
    position: int
    kv_head: int
    head: int
    heads: int


class Scratch(NamedTuple):
    """A thread's own memory."""

    q: Any  # [most_rows, head_dim], scaled
    scores: Any  # [ROWS, columns of a span], then weights
    sums: Any  # [most_rows, depth], values summed by weight
    best: Any  # [most_rows], greatest score so far
    mass: Any  # [most_rows], sum of weights


@inner
def _bend(scores: Any, i: int, p: Any, rule: Any, head: int, distance: int) -> None:
    """Soft cap, slope and bias of row i; `distance` is that of the span's first key."""
    width = scores.shape[1]
    if rule.soft_cap > 0:
        for c in range(width):
            scores[i, c] = rule.soft_cap * tanh(scores[i, c] / rule.soft_cap)
    if rule.slopes.size:
        for c in range(width):
            key = c // p.columns * p.block_size + c % p.columns
            scores[i, c] += rule.slopes[head] * np.float32(distance + key)
    if rule.bias.size:
        reach = rule.bias.shape[1] // 2
        for c in range(width):
            key = c // p.columns * p.block_size + c % p.columns
            scores[i, c] += rule.bias[head, min(max(distance + key, -reach), reach) + reach]


@inner
def _hide(scores: Any, i: int, p: Any, begin: int, end: int) -> None:
    """Marks what row i must not see: all but keys [begin, end) of the span, and the padding of pages."""
    width = scores.shape[1]
    if p.columns == p.block_size:
        for c in range(begin):
            scores[i, c] = UNSEEN
        for c in range(end, width):
            scores[i, c] = UNSEEN
    else:
        for c in range(width):
            key = c // p.columns * p.block_size + c % p.columns
            if c % p.columns >= p.block_size or key < begin or key >= end:
                scores[i, c] = UNSEEN


@inner
def _weigh(i: int, r: int, s: Any) -> None:
    """Turns row i of the scores into weights, and fades what row r has summed to its new greatest score.

    All columns take part always: the order of the sum must not depend on how many are visible."""
    width = s.scores.shape[1]
    top = s.best[r]
    for c in range(width):
        top = s.scores[i, c] if s.scores[i, c] > top else top
    if top > s.best[r]:
        fade = exp(s.best[r] - top)
        s.best[r] = top
        s.mass[r] *= fade
        for d in range(s.sums.shape[1]):
            s.sums[r, d] *= fade
    added = np.float32(0)
    for c in range(width):
        x = s.scores[i, c]
        weight = np.float32(0) if x == UNSEEN else exp(x - top)
        s.scores[i, c] = weight
        added += weight
    s.mass[r] += added


@inner
def _weigh_row(i: int, r: int, span: int, end: int, u: Any, p: Any, rule: Any, s: Any) -> None:
    """Row r's scores for the keys from `span` on, in row i of the scores, become weights."""
    width = s.scores.shape[1]
    position = u.position + r // u.heads
    last = (min(position + 1, end) if rule.causal else end) - span
    first = max(position - rule.window + 1 - span, 0) if rule.window else 0
    if r >= u.num_tokens * u.heads or first >= min(last, width // p.columns * p.block_size):
        for c in range(width):
            s.scores[i, c] = np.float32(0)
    else:
        _bend(s.scores, i, p, rule, u.head + r % u.heads, span - position)
        _hide(s.scores, i, p, first, last)
        _weigh(i, r, s)


@inner
def _attend_rows(
    r: int, span: int, end: int, u: Any, p: Any, rule: Any, table: Any, s: Any, element: Any
) -> None:
    """Rows [r, r + ROWS) of a unit meet the keys from `span` on; the unit sees none from `end` on."""
    rows = min(ROWS, u.num_tokens * u.heads - r)
    scores, stride = s.scores.ctypes.data, 4 * s.scores.shape[1]
    q, sums = s.q.ctypes.data + 4 * r * p.head_dim, s.sums.ctypes.data + 4 * r * p.depth
    blocks = min(s.scores.shape[1] // p.columns, (end - span + p.block_size - 1) // p.block_size)
    for j in range(blocks):
        block = np.int64(table[u.sequence, span // p.block_size + j])
        page = p.keys + (block * p.num_kv_heads + u.kv_head) * p.page
        multiply_keys(scores + 4 * j * p.columns, stride, q, rows, p, page, element)
    for i in range(ROWS if rows > 1 else 1):
        _weigh_row(i, r + i, span, end, u, p, rule, s)
    for j in range(blocks):
        block = np.int64(table[u.sequence, span // p.block_size + j])
        page = p.values + (block * p.num_kv_heads + u.kv_head) * p.page
        n = min(p.block_size, end - span - j * p.block_size)
        add_values(sums, scores + 4 * j * p.columns, stride, rows, n, p, page, element)


@inner
def _begin_row(r: int, u: Any, q: Any, scale: Any, s: Any) -> None:
    """Rows behind the last one of a unit, up to a multiple of ROWS, are zero."""
    s.best[r], s.mass[r] = UNSEEN, np.float32(0)
    factor = scale if r < u.num_tokens * u.heads else np.float32(0)
    token, head = u.start + min(r // u.heads, u.num_tokens - 1), u.head + r % u.heads
    for d in range(s.sums.shape[1]):
        s.sums[r, d] = np.float32(0)
    for d in range(s.q.shape[1]):
        s.q[r, d] = q[token, head, d] * factor


@inner
def _attend_unit(
    u: Any, q: Any, out: Any, seq_len: int, p: Any, rule: Any, table: Any, s: Any, element: Any
) -> None:
    rows = u.num_tokens * u.heads
    for r in range((rows + ROWS - 1) // ROWS * ROWS):
        _begin_row(r, u, q, rule.scale, s)
    begin = max(u.position - rule.window + 1, 0) if rule.window else 0
    end = min(u.position + u.num_tokens, seq_len) if rule.causal else seq_len
    length = s.scores.shape[1] // p.columns * p.block_size
    for span in range(begin // length * length, end, length):
        for r in range(0, rows, ROWS):
            _attend_rows(r, span, end, u, p, rule, table, s, element)
    for r in range(rows):
        factor = np.float32(1) / s.mass[r] if s.mass[r] != 0 else np.float32(0)
        for d in range(p.head_dim):
            out[u.start + r // u.heads, u.head + r % u.heads, d] = s.sums[r, d] * factor


def _attend_kernel(element: Any) -> Kernel:
    def attend(args: Any) -> None:
        a = carray(args, 28)
        p = Pages(a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9])
        num_tokens, num_heads, num_seqs, max_blocks = a[10], a[11], a[12], a[13]
        num_tiles, most_rows = a[14], a[15]
        q = carray(pointer(a[16], _F32), (num_tokens, num_heads, p.head_dim))
        out = carray(pointer(a[17], _F32), (num_tokens, num_heads, p.head_dim))
        seq_lens = carray(pointer(a[18], _I32), (num_seqs,))
        table = carray(pointer(a[19], _I32), (num_seqs, max_blocks))
        tiles = carray(pointer(a[20], _I32), (num_tiles, 4))
        slopes = carray(pointer(a[25], _F32), (num_heads if a[25] else 0,))
        bias = carray(pointer(a[26], _F32), (num_heads if a[26] else 0, a[27]))
        rule = Rule(as_float(a[21]), as_float(a[22]), a[23], a[24], slopes, bias)
        s = Scratch(
            np.empty((most_rows, p.head_dim), np.float32),
            np.empty((ROWS, max(1, SPAN // p.block_size) * p.columns), np.float32),
            np.empty((most_rows, p.depth), np.float32),
            np.empty(most_rows, np.float32),
            np.empty(most_rows, np.float32),
        )
        group = num_heads // p.num_kv_heads
        parts = (group + HEADS - 1) // HEADS
        index = take(args)
        while index < num_tiles * p.num_kv_heads * parts:
            part, rest = index % parts, index // parts
            kv_head, t = rest % p.num_kv_heads, rest // p.num_kv_heads
            heads, head = min(HEADS, group - part * HEADS), kv_head * group + part * HEADS
            u = Unit(tiles[t, 0], tiles[t, 1], tiles[t, 2], tiles[t, 3], kv_head, head, heads)
            _attend_unit(u, q, out, seq_lens[u.sequence], p, rule, table, s, element)
            index = take(args)

    return Kernel(attend)


@inner
def _write_token(k: Any, v: Any, slot: int, p: Any, element: Any) -> None:
    """k, v: [num_kv_heads, head_dim]"""
    block, offset = slot // p.block_size, slot % p.block_size
    for h in range(p.num_kv_heads):
        page = (block * p.num_kv_heads + h) * p.page
        keys = carray(pointer(p.keys + page, element), (p.head_dim, p.columns))
        values = carray(pointer(p.values + page, element), (p.block_size, p.depth))
        for d in range(p.head_dim):
            keys[d, offset] = stored(k[h, d], element)
        for d in range(p.head_dim):
            values[offset, d] = stored(v[h, d], element)


def _write_kernel(element: Any) -> Kernel:
    def write(args: Any) -> None:
        a = carray(args, 14)
        p = Pages(a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9])
        num_tokens = a[10]
        k = carray(pointer(a[11], _F32), (num_tokens, p.num_kv_heads, p.head_dim))
        v = carray(pointer(a[12], _F32), (num_tokens, p.num_kv_heads, p.head_dim))
        slots = carray(pointer(a[13], _I64), (num_tokens,))
        first = take(args) * TOKENS
        while first < num_tokens:
            for t in range(first, min(num_tokens, first + TOKENS)):
                if slots[t] >= 0:
                    _write_token(k[t], v[t], slots[t], p, element)
            first = take(args) * TOKENS

    return Kernel(write)


ATTEND = {dtype: _attend_kernel(element) for dtype, element in _ELEMENTS.items()}
WRITE = {dtype: _write_kernel(element) for dtype, element in _ELEMENTS.items()}
