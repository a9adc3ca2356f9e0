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
from tgis.shard.kernels.cpu.jit.vectors import LANES

_U32, _I64 = np.uint32(0), np.int64(0)
_HALVES = pairs.COLUMNS * LANES  # numbers in a vector of pairs
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
        left, offset = b.trunc(b.sub(count, k), I32), b.mul(k, I64(4))
        x = llvm.load_vector(b, b.add(source, offset), LANES, llvm.first_lanes(b, left, LANES))
        bits = b.lshr(llvm.round_to_bfloat16(b, x), shift)
        kind = ir.VectorType(I16, _HALVES)
        mask = b.and_(halves, llvm.first_lanes(b, b.mul(left, I32(pairs.COLUMNS)), _HALVES))
        place = llvm.pointer_to(b, kind, b.add(to, offset))
        name = f"llvm.masked.store.v{_HALVES}i16.p0"
        llvm.call(b, name, ir.VoidType(), b.bitcast(bits, kind), place, I32(2), mask)
        return []

    llvm.loop_range(b, I64(0), count, LANES, [], write_vector)


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
        page, head = (block * p.num_kv_heads + h) * size, 4 * h * p.head_dim
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
    first = next_unit(args) * TOKENS
    while first < num_tokens:
        for t in range(first, min(num_tokens, first + TOKENS)):
            if slots[t] >= 0:
                k, v = new_keys + t * token_bytes, new_values + t * token_bytes
                _write_token(k, v, slots[t], p, buffer.ctypes.data)
        first = next_unit(args) * TOKENS
    keep_alive(buffer)


WRITE_PAIRS = Kernel(_write_pairs) if pairs.is_supported() else None
"""None if the processor does not multiply pairs."""
