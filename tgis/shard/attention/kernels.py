"""Paged attention as compiled kernels: keeping fresh keys and values, and attending to the pages in place.

A unit of work is a tile (up to `TILE` tokens of one sequence), a kv head and up to `HEADS` of the query heads that share
it; its rows are their combinations. Keys are taken a span at a time, counted from the sequence's start, and every row
meets them in the same order with the same arithmetic, so its bits depend neither on the other rows nor on how its
sequence was cut into chunks."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.attention import product
from tgis.shard.attention.base import TILE
from tgis.shard.attention.product import LANES, ROWS
from tgis.shard.compiled import Kernel, as_float, inner, pointer, take
from tgis.shard.numeric import exp, stored, tanh

HEADS = 16
SPAN = 64  # keys whose scores become weights at once
TOKENS = 8  # tokens whose keys and values are stored as one unit of work
UNSEEN = np.float32(-1e30)

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
    """How a score becomes a weight; zero and empty arrays mean absent."""

    scale: Any
    soft_cap: Any
    window: int
    causal: int
    slopes: Any  # [num_heads]
    bias: Any  # [num_heads, 2 * reach + 1]


class Unit(NamedTuple):
    """`count` tokens from row `first` of the step, at `position` of their sequence, and `heads` heads from `head`."""

    sequence: int
    first: int
    count: int
    position: int
    kv_head: int
    head: int
    heads: int


@inner
def _multiply_keys(scores: int, stride: int, q: int, rows: int, p: Any, page: int, element: Any) -> None:
    """scores[rows, columns] = q[rows, head_dim] @ page of keys."""
    for c in range(0, p.columns, 2 * LANES):
        two = p.columns - c > LANES
        out, matrix, n = scores + 4 * c, page + p.width * c, p.head_dim
        if rows > 1 and two:
            product.set_4x2(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)
        elif rows > 1:
            product.set_4x1(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)
        elif two:
            product.set_1x2(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)
        else:
            product.set_1x1(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)


@inner
def _add_values(total: int, weights: int, stride: int, rows: int, n: int, p: Any, page: int, element: Any) -> None:
    """total[rows, depth] += weights[rows, :n] @ the first n rows of a page of values."""
    for c in range(0, p.depth, 2 * LANES):
        two = p.depth - c > LANES
        out, matrix = total + 4 * c, page + p.width * c
        if rows > 1 and two:
            product.add_4x2(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
        elif rows > 1:
            product.add_4x1(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
        elif two:
            product.add_1x2(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
        else:
            product.add_1x1(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)


@inner
def _bend(scores: Any, i: int, p: Any, rule: Any, head: int, distance: int) -> None:
    """Soft cap, slope and bias of row i; `distance` is that of the span's first key from the query, rarely positive."""
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
    """Marks what row i must not see: all but the span's keys [begin, end), and the padding of pages."""
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
def _weigh(scores: Any, i: int, sums: Any, best: Any, mass: Any, r: int) -> None:
    """Turns row i of scores into weights, and fades what row r has summed so far to the new greatest score.

    All columns always take part: the order of the sum must not depend on how many are visible."""
    width = scores.shape[1]
    top = best[r]
    for c in range(width):
        top = scores[i, c] if scores[i, c] > top else top
    if top > best[r]:
        fade = exp(best[r] - top)
        best[r] = top
        mass[r] *= fade
        for d in range(sums.shape[1]):
            sums[r, d] *= fade
    added = np.float32(0)
    for c in range(width):
        x = scores[i, c]
        weight = np.float32(0) if x == UNSEEN else exp(x - top)
        scores[i, c] = weight
        added += weight
    mass[r] += added


@inner
def _attend_rows(u: Any, r: int, span: int, end: int, p: Any, rule: Any, table: Any, scratch: Any, element: Any) -> None:
    """Rows [r, r + ROWS) of a unit against the span of keys that begins at key `span`; the unit sees keys before `end`."""
    q, scores, sums, best, mass = scratch
    rows = min(ROWS, u.count * u.heads - r)
    stride, address = 4 * scores.shape[1], scores.ctypes.data
    blocks = min(scores.shape[1] // p.columns, (end - span + p.block_size - 1) // p.block_size)
    first = span // p.block_size
    for j in range(blocks):
        page = p.keys + (np.int64(table[u.sequence, first + j]) * p.num_kv_heads + u.kv_head) * p.page
        q_row = q.ctypes.data + 4 * r * p.head_dim
        _multiply_keys(address + 4 * j * p.columns, stride, q_row, rows, p, page, element)
    length = scores.shape[1] // p.columns * p.block_size
    for i in range(ROWS if rows > 1 else 1):
        position = u.position + (r + i) // u.heads
        until = min(position + 1 if rule.causal else end, end) - span
        begin = max(position - rule.window + 1 - span, 0) if rule.window else 0
        if i >= rows or begin >= min(until, length):
            for c in range(scores.shape[1]):
                scores[i, c] = np.float32(0)
        else:
            _bend(scores, i, p, rule, u.head + (r + i) % u.heads, span - position)
            _hide(scores, i, p, begin, until)
            _weigh(scores, i, sums, best, mass, r + i)
    for j in range(blocks):
        page = p.values + (np.int64(table[u.sequence, first + j]) * p.num_kv_heads + u.kv_head) * p.page
        n = min(p.block_size, end - span - j * p.block_size)
        weights = address + 4 * j * p.columns
        _add_values(sums.ctypes.data + 4 * r * p.depth, weights, stride, rows, n, p, page, element)


@inner
def _attend_unit(u: Any, q: Any, out: Any, seq_len: int, p: Any, rule: Any, table: Any, scratch: Any, element: Any) -> None:
    q_rows, scores, sums, best, mass = scratch
    rows = u.count * u.heads
    for r in range((rows + ROWS - 1) // ROWS * ROWS):
        best[r], mass[r] = UNSEEN, np.float32(0)
        for d in range(p.depth):
            sums[r, d] = np.float32(0)
        for d in range(p.head_dim):
            q_rows[r, d] = q[u.first + r // u.heads, u.head + r % u.heads, d] * rule.scale if r < rows else np.float32(0)
    begin = max(u.position - rule.window + 1, 0) if rule.window else 0
    end = min(u.position + u.count, seq_len) if rule.causal else seq_len
    length = scores.shape[1] // p.columns * p.block_size
    for span in range(begin // length * length, end, length):
        for r in range(0, rows, ROWS):
            _attend_rows(u, r, span, end, p, rule, table, scratch, element)
    for r in range(rows):
        factor = np.float32(1) / mass[r] if mass[r] > 0 else np.float32(0)
        for d in range(p.head_dim):
            out[u.first + r // u.heads, u.head + r % u.heads, d] = sums[r, d] * factor


def _attend_kernel(element: Any) -> Kernel:
    def attend(args: Any) -> None:
        a = carray(args, 32)
        p = Pages(a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9])
        num_tokens, num_heads, num_seqs, max_blocks, num_tiles, max_rows, reach = a[10], a[11], a[12], a[13], a[14], a[15], a[16]
        q = carray(pointer(a[17], _F32), (num_tokens, num_heads, p.head_dim))
        out = carray(pointer(a[18], _F32), (num_tokens, num_heads, p.head_dim))
        seq_lens = carray(pointer(a[19], _I32), (num_seqs,))
        table = carray(pointer(a[20], _I32), (num_seqs, max_blocks))
        tiles = carray(pointer(a[21], _I32), (num_tiles, 4))
        slopes = carray(pointer(a[22], _F32), (num_heads if a[22] else 0,))
        bias = carray(pointer(a[23], _F32), (num_heads if a[23] else 0, reach))
        rule = Rule(as_float(a[24]), as_float(a[25]), a[26], a[27], slopes, bias)
        group = num_heads // p.num_kv_heads
        parts = (group + HEADS - 1) // HEADS
        spans = max(1, SPAN // p.block_size)
        q_rows, sums = np.zeros((max_rows, p.head_dim), np.float32), np.zeros((max_rows, p.depth), np.float32)
        scores = np.zeros((ROWS, spans * p.columns), np.float32)
        best, mass = np.zeros(max_rows, np.float32), np.zeros(max_rows, np.float32)
        scratch = (q_rows, scores, sums, best, mass)
        index = take(args)
        while index < num_tiles * p.num_kv_heads * parts:
            part, rest = index % parts, index // parts
            kv_head, t = rest % p.num_kv_heads, rest // p.num_kv_heads
            heads = min(HEADS, group - part * HEADS)
            u = Unit(tiles[t, 0], tiles[t, 1], tiles[t, 2], tiles[t, 3], kv_head, kv_head * group + part * HEADS, heads)
            _attend_unit(u, q, out, seq_lens[u.sequence], p, rule, table, scratch, element)
            index = take(args)

    return Kernel(attend)


def _write_kernel(element: Any) -> Kernel:
    def write(args: Any) -> None:
        a = carray(args, 16)
        p = Pages(a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9])
        num_tokens = a[10]
        k = carray(pointer(a[11], _F32), (num_tokens, p.num_kv_heads, p.head_dim))
        v = carray(pointer(a[12], _F32), (num_tokens, p.num_kv_heads, p.head_dim))
        slots = carray(pointer(a[13], _I64), (num_tokens,))
        chunk = take(args)
        while chunk * TOKENS < num_tokens:
            for t in range(chunk * TOKENS, min(num_tokens, (chunk + 1) * TOKENS)):
                _write_token(k, v, t, slots[t], p, element)
            chunk = take(args)

    return Kernel(write)


@inner
def _write_token(k: Any, v: Any, t: int, slot: int, p: Any, element: Any) -> None:
    block, offset = slot // p.block_size, slot % p.block_size
    for h in range(p.num_kv_heads):
        page = (block * p.num_kv_heads + h) * p.page
        keys = carray(pointer(p.keys + page, element), (p.head_dim, p.columns))
        values = carray(pointer(p.values + page, element), (p.block_size, p.depth))
        for d in range(p.head_dim):
            keys[d, offset] = stored(k[t, h, d], element)
        for d in range(p.head_dim):
            values[offset, d] = stored(v[t, h, d], element)


ATTEND = {name: _attend_kernel(element) for name, element in (("float32", np.float32(0)), ("bfloat16", np.uint16(0)), ("float16", np.int16(0)))}
WRITE = {name: _write_kernel(element) for name, element in (("float32", np.float32(0)), ("bfloat16", np.uint16(0)), ("float16", np.int16(0)))}
