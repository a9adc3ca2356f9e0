"""Compiled kernels of paged attention: one writes new keys and values to the cache, one computes attention.

All data that change between steps are in the step's table (`CpuPlan.table`), so the same arguments serve
every step with the same number of tokens."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.amx.instructions import INSTRUCTIONS, TILE_ROWS
from tgis.shard.kernels.cpu.attention.amx.keys import ELEMENT as TILE_ELEMENT
from tgis.shard.kernels.cpu.attention.amx.tiny_numbers import flush_tiny_numbers, restore_mode
from tgis.shard.kernels.cpu.attention.elements.conversion import CACHE_ELEMENTS, as_element
from tgis.shard.kernels.cpu.attention.elements.float8 import loses_nan
from tgis.shard.kernels.cpu.attention.elements.int8 import has_scales, write_scale
from tgis.shard.kernels.cpu.attention.elements.rotation import rotate
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN
from tgis.shard.kernels.cpu.attention.segments import SegmentPart, find_first_key, result_size
from tgis.shard.kernels.cpu.attention.tiles import (
    Pages,
    Queries,
    ScoringArgs,
    Scratch,
    WorkUnit,
    attend_unit,
    page_bytes,
    read_int,
    round_up,
)
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    as_float,
    inlined,
    keep_alive,
    next_unit,
    operands,
    pointer,
    reorderable,
)
from tgis.shard.kernels.cpu.jit.vectors import LANES

HEADS = 16  # maximum query heads of a unit of work
TOKENS = 8  # tokens in a unit of work of the writing kernel
ALIGNMENT = 64
ITEM = 28  # bytes of one of `CpuPlan.items`
TABLE = 11  # length of `CpuPlan.table`
# Indices in `CpuPlan.table`.
NUM_TOKENS_AT = 0
MAX_BLOCKS_AT = 2
NUM_ITEMS_AT = 3
MAX_TILE_AT = 4
SEQ_LENS_AT = 5
BLOCK_TABLES_AT = 6
ITEMS_AT = 7
SLOTS_AT = 8
SEGMENT_LEN_AT = 9
PARTIALS_AT = 10

_F32, _I64 = np.float32(0), np.int64(0)


@reorderable
def _find_unit(index: int, group: int, step: Any, p: Any, scoring: Any, size: int) -> Any:
    """Return unit of work number `index` and the segments that it attends to. `group` query heads share a KV
    head. `size` is the number of bytes of a token's partial results."""
    parts = (group + HEADS - 1) // HEADS
    part = index % parts
    rest = index // parts
    kv_head = rest % p.num_kv_heads
    item = step[ITEMS_AT] + ITEM * (rest // p.num_kv_heads)
    sequence = read_int(item)
    start = read_int(item + 4)
    count, position = read_int(item + 8), read_int(item + 12)
    num_parts, segment, partial = read_int(item + 16), read_int(item + 20), read_int(item + 24)
    seq_len = read_int(step[SEQ_LENS_AT] + 4 * sequence)
    segment_len = step[SEGMENT_LEN_AT]
    tile_end = min(position + count, seq_len) if scoring.causal else seq_len
    begin = find_first_key(position, scoring) // SPAN * SPAN
    end = tile_end
    if num_parts > 1:
        begin, end = max(begin, segment * segment_len), min(end, (segment + 1) * segment_len)
    heads = min(HEADS, group - part * HEADS)
    head = kv_head * group + part * HEADS
    blocks = step[BLOCK_TABLES_AT] + 4 * sequence * step[MAX_BLOCKS_AT]
    partials = step[PARTIALS_AT] + partial * size
    u = WorkUnit(blocks, start, count, position, kv_head, head, heads, begin, end)
    return u, SegmentPart(tile_end, segment_len, num_parts, segment, partials)


@reorderable
def _count_units(group: int, step: Any, p: Any) -> Any:
    return step[NUM_ITEMS_AT] * p.num_kv_heads * ((group + HEADS - 1) // HEADS)


@inlined
def _attend_unit_number(
    index: int, num_threads: int, queries: Any, step: Any, p: Any, scoring: Any, s: Any, element: Any
) -> bool:
    """Compute unit of work number `index`. Return False if there is none."""
    group = queries.num_heads // p.num_kv_heads
    size = 4 * queries.num_heads * result_size(s.length)
    num_units = _count_units(group, step, p)
    if index >= num_units:
        return False
    u, segments = _find_unit(index, group, step, p, scoring, size)
    # The next unit of this thread if all threads are equally fast.
    following, _ = _find_unit(min(index + num_threads, num_units - 1), group, step, p, scoring, size)
    attend_unit(u, following, queries, segments, p, scoring, s, element)
    return True


def attend_kernel(element: Any, factor: Any = _F32, columns: int = 1) -> Kernel:
    """Return the kernel of attention to a cache whose elements hold `columns` numbers. `element` and `factor`
    are values of the types of elements and of their factors, queries and softmax weights."""

    def attend(args: Any) -> None:
        keys, values, num_kv_heads, head_dim, block_size, width = operands(args, 1, 6)
        num_heads, table, q_address, out = operands(args, 7, 4)
        scale, soft_cap, window, causal = operands(args, 11, 4)
        slopes, bias, num_biases, sinks, first_key = operands(args, 15, 5)
        key_bits, value_bits, num_threads = operands(args, 20, 3)
        key_factor, value_factor = as_float(key_bits), as_float(value_bits)
        p = Pages(keys, values, num_kv_heads, head_dim, block_size, width, key_factor, value_factor, columns)
        queries = Queries(q_address, out, num_heads)
        step = carray(pointer(table, _I64), TABLE)
        scales = as_float(scale), as_float(soft_cap)
        scoring = ScoringArgs(*scales, window, causal, slopes, bias, num_biases, sinks, first_key)
        depth = round_up(p.head_dim, LANES)
        max_rows = step[MAX_TILE_AT] * min(HEADS, num_heads // p.num_kv_heads) + TILE_ROWS
        q = max_rows * depth
        sums = max_rows * (depth + LANES)
        maxima = round_up(max_rows, LANES)
        gathered = SPAN * (p.head_dim + depth)
        results = max_rows * result_size(depth + LANES)
        fixed = 5 * LANES + TILE_ROWS * SPAN + 24 * GROUPS + 2 * SPAN
        size = fixed + q + sums + maxima + gathered + results
        memory = np.empty(size, np.float32)
        begin = round_up(memory.ctypes.data, ALIGNMENT)
        updates = begin + 4 * (q + sums + maxima)
        bounds, scores = updates + 8 * LANES, updates + 16 * LANES
        places = scores + 4 * TILE_ROWS * SPAN
        rest = places + 96 * GROUPS + 8 * SPAN
        factors = places + 96 * GROUPS if has_scales(element) else 0
        rows = (begin, begin + 4 * q, depth + LANES, begin + 4 * (q + sums), rest + 4 * gathered)
        s = Scratch(*rows, updates, bounds, scores, places, factors, rest, factor)
        mode = flush_tiny_numbers(element)
        is_unit = True
        while is_unit:  # with the call as condition, its code would be in the loop twice
            unit = next_unit(args)
            is_unit = _attend_unit_number(unit, num_threads, queries, step, p, scoring, s, element)
        restore_mode(mode, element)
        keep_alive(memory)

    return Kernel(attend)


@reorderable
def _has_nan(k: Any, v: Any) -> bool:
    has_nan = False
    for d in range(len(k)):
        has_nan |= np.isnan(k[d]) or np.isnan(v[d])
    return has_nan


@reorderable
def _write_token(k: Any, v: Any, slot: int, p: Any, element: Any) -> None:
    """Write the key and value of one token, [num_kv_heads, head_dim] each, to its slot."""
    block = slot // p.block_size
    offset = slot % p.block_size
    for h in range(p.num_kv_heads):
        page = (block * p.num_kv_heads + h) * p.head_dim * p.block_size * p.width
        keys = carray(pointer(p.keys + page, element), (p.head_dim, p.block_size))
        values = carray(pointer(p.values + page, element), (p.block_size, p.head_dim))
        for d in range(p.head_dim):
            keys[d, offset] = as_element(k[h, d] * p.key_factor, element)
        for d in range(p.head_dim):
            values[offset, d] = as_element(v[h, d] * p.value_factor, element)
        if loses_nan(element) and _has_nan(k[h], v[h]):
            keys[0, offset] = as_element(np.float32(np.nan), element)


@reorderable
def _write_codes(k: Any, v: Any, slot: int, p: Any, element: Any) -> None:
    """Do the same as `_write_token` for elements with scales."""
    block = slot // p.block_size
    offset = slot % p.block_size
    key = np.empty(p.head_dim, np.float32)
    for h in range(p.num_kv_heads):
        page = (block * p.num_kv_heads + h) * page_bytes(p, element)
        keys = carray(pointer(p.keys + page, element), (p.head_dim, p.block_size))
        values = carray(pointer(p.values + page, element), (p.block_size, p.head_dim))
        for d in range(p.head_dim):
            key[d] = k[h, d]
        rotate(key.ctypes.data, p.head_dim)
        factor = write_scale(key, p.keys + page, offset, p)
        for d in range(p.head_dim):
            keys[d, offset] = as_element(key[d] * factor if factor > 0 else _F32, element)
        factor = write_scale(v[h], p.values + page, offset, p)
        for d in range(p.head_dim):
            values[offset, d] = as_element(v[h, d] * factor if factor > 0 else _F32, element)
    keep_alive(key)


def _write_kernel(element: Any) -> Kernel:
    def write(args: Any) -> None:
        keys, values, num_kv_heads, head_dim, block_size, width = operands(args, 1, 6)
        table, new_keys, new_values, key_bits, value_bits = operands(args, 7, 5)
        key_factor, value_factor = as_float(key_bits), as_float(value_bits)
        p = Pages(keys, values, num_kv_heads, head_dim, block_size, width, key_factor, value_factor, 1)
        step = carray(pointer(table, _I64), TABLE)
        num_tokens = step[NUM_TOKENS_AT]
        k = carray(pointer(new_keys, _F32), (num_tokens, p.num_kv_heads, p.head_dim))
        v = carray(pointer(new_values, _F32), (num_tokens, p.num_kv_heads, p.head_dim))
        slots = carray(pointer(step[SLOTS_AT], _I64), (num_tokens,))
        first = next_unit(args) * TOKENS
        while first < num_tokens:
            for t in range(first, min(num_tokens, first + TOKENS)):
                if slots[t] < 0:
                    continue
                if has_scales(element):
                    _write_codes(k[t], v[t], slots[t], p, element)
                else:
                    _write_token(k[t], v[t], slots[t], p, element)
            first = next_unit(args) * TOKENS

    return Kernel(write)


ATTEND = {dtype: attend_kernel(element) for dtype, element in CACHE_ELEMENTS.items()}
ATTEND_TILES = None if INSTRUCTIONS is None else attend_kernel(TILE_ELEMENT, np.uint32(0), pairs.COLUMNS)
"""Attention to pairs of bfloat16 on AMX tiles. None if the processor has no AMX."""
WRITE = {dtype: _write_kernel(element) for dtype, element in CACHE_ELEMENTS.items()}
