"""Pages of pairs of bfloat16, a layout of the cache that products of pairs read in place. A pair in a page of
keys, [head_dim / 2, block_size], holds two channels of a key. A pair in a page of values, [block_size / 2,
head_dim], holds one channel of two values. The first number is the upper half of the pair, so it comes last
in memory."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray

from tgis.shard.kernels.cpu.attention.kernels import NUM_TOKENS_AT, SLOTS_AT, TABLE, TOKENS
from tgis.shard.kernels.cpu.attention.tiles import Pages, round_up
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    as_float,
    keep_alive,
    llvm_function,
    next_unit,
    operands,
    pointer,
    reorderable,
)
from tgis.shard.kernels.cpu.jit.llvm import I1, I16, I32, I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, load, prefer_512_bits

_U32, _I64 = np.uint32(0), np.int64(0)
_HALVES = pairs.COLUMNS * LANES  # numbers in a vector of pairs
_MANY_TOKENS = 64  # tokens in a unit of work of large steps, so that most are in whole groups
_MASK = ir.VectorType(I1, _HALVES)


@llvm_function()
def _round_channels(b: Any, to: Any, source: Any, count: Any) -> None:
    pairs.copy_rounded(b, to, source, count)


@llvm_function()
def _write_halves(b: Any, to: Any, source: Any, count: Any, is_later: Any) -> None:
    """Round `count` float32 numbers and write them as the first or second numbers of the pairs at `to`. Other
    threads may write the other numbers at the same time."""
    is_later = b.trunc(is_later, I1)
    shift = llvm.broadcast(b, b.select(is_later, I32(16), I32(0)), LANES)
    halves = b.select(is_later, *(ir.Constant(_MASK, [part, 1 - part] * LANES) for part in (1, 0)))

    def write_vector(k: Any, _: list[Any]) -> list[Any]:
        left = b.trunc(b.sub(count, k), I32)
        offset = b.mul(k, I64(4))
        x = llvm.load_vector(b, b.add(source, offset), LANES, llvm.first_lanes(b, left, LANES))
        bits = b.lshr(llvm.round_to_bfloat16(b, x), shift)
        kind = ir.VectorType(I16, _HALVES)
        mask = b.and_(halves, llvm.first_lanes(b, b.mul(left, I32(pairs.COLUMNS)), _HALVES))
        place = llvm.pointer_to(b, kind, b.add(to, offset))
        name = f"llvm.masked.store.v{_HALVES}i16.p0"
        llvm.call(b, name, ir.VoidType(), b.bitcast(bits, kind), place, I32(2), mask)
        return []

    llvm.loop_range(b, I64(0), count, LANES, [], write_vector)


@llvm_function()
def _write_group(
    b: Any, keys: Any, key_stride: Any, values: Any, k: Any, v: Any, token_bytes: Any, head_dim: Any
) -> None:
    """Write the keys and values of one head of LANES tokens, whose first one is even, to a page.

    keys: address of the tokens' columns in rows of pairs that are `key_stride` bytes apart. values: address
    of their rows of pairs. k, v: addresses of the first token's float32 [head_dim], those of the next ones
    are `token_bytes` further. head_dim: a multiple of _HALVES."""
    prefer_512_bits(b)

    def load_vector(source: Any, token: int, channel: Any) -> Any:
        offset = b.add(b.mul(token_bytes, I64(token)), b.mul(channel, I64(4)))
        return load(b, source, offset)

    def write_keys(channel: Any, _: list[Any]) -> list[Any]:
        rows = [
            pairs.round_two(
                b, [load_vector(k, token, b.add(channel, I64(half * LANES))) for half in range(pairs.COLUMNS)]
            )
            for token in range(LANES)
        ]
        first = b.udiv(channel, I64(pairs.COLUMNS))
        for i, column in enumerate(llvm.transpose(b, rows)):
            offset = b.mul(b.add(first, I64(i)), key_stride)
            llvm.store_vector(b, column, b.add(keys, offset))
        return []

    def write_values(channel: Any, _: list[Any]) -> list[Any]:
        for row in range(LANES // pairs.COLUMNS):
            upper, lower = (
                llvm.round_to_bfloat16(b, load_vector(v, pairs.COLUMNS * row + i, channel))
                for i in range(pairs.COLUMNS)
            )
            pair = b.or_(upper, b.lshr(lower, llvm.constant(16, LANES, I32)))
            offset = b.mul(b.add(b.mul(head_dim, I64(row)), channel), I64(pairs.NUM_BYTES))
            llvm.store_vector(b, pair, b.add(values, offset))
        return []

    llvm.loop_range(b, I64(0), head_dim, _HALVES, [], write_keys)
    llvm.loop_range(b, I64(0), head_dim, LANES, [], write_values)


@reorderable
def _write_tokens(k: int, v: int, slot: int, p: Any, token_bytes: int) -> None:
    """Write the keys and values of LANES tokens, the first ones at addresses of [num_kv_heads, head_dim], to
    slots from `slot` on, a multiple of LANES."""
    block, offset = slot // p.block_size, slot % p.block_size
    size = p.head_dim * p.block_size * pairs.NUM_BYTES // pairs.COLUMNS
    for h in range(p.num_kv_heads):
        page = (block * p.num_kv_heads + h) * size
        head = 4 * h * p.head_dim
        keys = p.keys + page + pairs.NUM_BYTES * offset
        values = p.values + page + offset // pairs.COLUMNS * pairs.NUM_BYTES * p.head_dim
        stride = pairs.NUM_BYTES * p.block_size
        _write_group(keys, stride, values, k + head, v + head, token_bytes, p.head_dim)


@reorderable
def _begins_group(slots: Any, t: int, end: int) -> Any:
    """Return True if tokens [t, t + LANES) are before `end` and have adjacent slots of one block."""
    if t + LANES > end or slots[t] < 0 or slots[t] % LANES != 0:
        return False
    count = 1
    while count < LANES and slots[t + count] == slots[t] + count:
        count += 1
    return count == LANES


@reorderable
def _write_token(k: int, v: int, slot: int, p: Any, buffer: int) -> None:
    """Write the key and value of one token, at addresses of [num_kv_heads, head_dim], to its slot. `buffer`
    is the address of scratch memory for a head of k."""
    block = slot // p.block_size
    offset = slot % p.block_size
    num_pairs = p.head_dim // pairs.COLUMNS
    size = p.head_dim * p.block_size * pairs.NUM_BYTES // pairs.COLUMNS
    rounded = carray(pointer(buffer, _U32), (num_pairs,))
    for h in range(p.num_kv_heads):
        page = (block * p.num_kv_heads + h) * size
        head = 4 * h * p.head_dim
        _round_channels(buffer, k + head, p.head_dim)
        keys = carray(pointer(p.keys + page, _U32), (num_pairs, p.block_size))
        for d in range(num_pairs):
            keys[d, offset] = rounded[d]
        row = p.values + page + offset // pairs.COLUMNS * pairs.NUM_BYTES * p.head_dim
        _write_halves(row, v + head, p.head_dim, offset % pairs.COLUMNS)


def _write_pairs(args: Any) -> None:
    keys, values, num_kv_heads, head_dim, block_size, width = operands(args, 1, 6)
    table, new_keys, new_values, key_bits, value_bits = operands(args, 7, 5)
    factors = (as_float(key_bits), as_float(value_bits))
    p = Pages(keys, values, num_kv_heads, head_dim, block_size, width, factors[0], factors[1], pairs.COLUMNS)
    step = carray(pointer(table, _I64), TABLE)
    num_tokens = step[NUM_TOKENS_AT]
    token_bytes = 4 * p.num_kv_heads * p.head_dim
    slots = carray(pointer(step[SLOTS_AT], _I64), (num_tokens,))
    buffer = np.empty(round_up(p.head_dim, _HALVES), np.uint32)
    has_groups = p.head_dim % _HALVES == 0 and p.block_size % LANES == 0
    unit_tokens = _MANY_TOKENS if num_tokens > 2 * _MANY_TOKENS else TOKENS
    first = next_unit(args) * unit_tokens
    while first < num_tokens:
        t = first
        end = min(num_tokens, first + unit_tokens)
        while t < end:
            k, v = new_keys + t * token_bytes, new_values + t * token_bytes
            if has_groups and _begins_group(slots, t, end):
                _write_tokens(k, v, slots[t], p, token_bytes)
                t += LANES
            else:
                if slots[t] >= 0:
                    _write_token(k, v, slots[t], p, buffer.ctypes.data)
                t += 1
        first = next_unit(args) * unit_tokens
    keep_alive(buffer)


WRITE_PAIRS = Kernel(_write_pairs) if pairs.is_supported() else None
"""None if the processor does not multiply pairs."""
