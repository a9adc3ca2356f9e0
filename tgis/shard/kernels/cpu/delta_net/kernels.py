"""Compiled kernels of gated DeltaNet layers. Tokens of a sequence are computed one after the other, each as
if alone, so a token's bits do not depend on the step, the chunk of the prompt or the batch that computes it.

The sums of some channels stay in the first-level cache while the tokens of a prompt pass."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    as_float,
    keep_alive,
    llvm_function,
    next_unit,
    operands,
    ordered,
    pointer,
)
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.kernels.cpu.jit.scalar_math import exp, softplus
from tgis.shard.kernels.cpu.jit.scalar_math import multiply_add as fused
from tgis.shard.kernels.cpu.jit.vectors import ZERO, load, multiply_add, prefer_512_bits, store
from tgis.shard.kernels.cpu.pointwise.norms import sum_squares
from tgis.shard.kernels.cpu.states.blocks import (
    MAX_BLOCKS,
    count_blocks,
    find_target,
    list_blocks,
    open_sums,
    prefetch_token,
)
from tgis.shard.memory.state_cache import BLOCK

_EPS = np.float32(1e-6)  # of the length of queries and keys
_F32, _I64 = np.float32(0), np.int64(0)
_BYTES = 4


@ordered
def _sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + exp(-x))


@ordered
def _scale_to_length(x: Any, length: Any) -> None:
    factor = length / np.sqrt(sum_squares(x) + _EPS)
    for i in range(x.shape[0]):
        x[i] *= factor


@ordered
def _find_factors(gates: Any, decay: Any, bias: Any, first: int, factors: Any) -> None:
    """Set every head's factors: of its sums and of its update."""
    total = gates.shape[0] // 2
    for h in range(decay.shape[0]):
        factors[2 * h] = exp(softplus(gates[total + first + h] + bias[h]) * decay[h])
        factors[2 * h + 1] = _sigmoid(gates[first + h])


def _prepare(args: Any) -> None:
    """Scale queries and keys, and compute the factors."""
    num_tokens, num_channels, num_groups, state_size, num_heads = operands(args, 1, 5)
    gates_size, first_head, tokens_per_unit = operands(args, 6, 3)
    x_address, gates_address, decay_address, bias_address, factors_address = operands(args, 9, 5)
    x = carray(pointer(x_address, _F32), (num_tokens, num_channels))
    gates = carray(pointer(gates_address, _F32), (num_tokens, gates_size))
    decay = carray(pointer(decay_address, _F32), (num_heads,))
    bias = carray(pointer(bias_address, _F32), (num_heads,))
    factors = carray(pointer(factors_address, _F32), (num_tokens, 2 * num_heads))
    query_length = np.float32(1) / np.sqrt(np.float32(state_size))
    begin = next_unit(args) * tokens_per_unit
    while begin < num_tokens:
        for t in range(begin, min(num_tokens, begin + tokens_per_unit)):
            for g in range(2 * num_groups):
                length = query_length if g < num_groups else np.float32(1)
                _scale_to_length(x[t, g * state_size : (g + 1) * state_size], length)
            _find_factors(gates[t], decay, bias, first_head, factors[t])
        begin = next_unit(args) * tokens_per_unit


def _multiply_blocks(num_blocks: int) -> Any:
    """Return a function that sets `known` to sums^T key for blocks of a head. Its arguments are addresses."""

    @llvm_function()
    def multiply(b: Any, sums: Any, key: Any, known: Any, state_size: Any) -> None:
        prefer_512_bits(b)
        blocks = list_blocks(b, sums, state_size, num_blocks)

        def add(k: Any, totals: list[Any]) -> list[Any]:
            row = b.mul(k, I64(BLOCK * _BYTES))
            factor = llvm.load_broadcast(b, b.add(key, b.mul(k, I64(_BYTES))), BLOCK)
            return [
                multiply_add(b, load(b, block, row), factor, total)
                for block, total in zip(blocks, totals, strict=True)
            ]

        for i, total in enumerate(llvm.loop(b, state_size, [ZERO] * num_blocks, add)):
            store(b, total, known, I64(i * BLOCK * _BYTES))

    return multiply


def _advance_blocks(num_blocks: int) -> Any:
    """Return a function that advances blocks of a head by a token: target = decay * sums + key delta^T with
    delta = strength * (value - decay * known), and out = target^T query. Its arguments are addresses,
    `factors` that of decay and strength, and `known` that of sums^T key. `target` may be `sums`.
    It also replaces `known` by target^T following. If `following` is the next token's key, the sums are read
    only once per token, and there are enough independent sums to keep the processor busy."""

    @llvm_function()
    def advance(
        b: Any,
        sums: Any,
        target: Any,
        query: Any,
        key: Any,
        following: Any,
        value: Any,
        factors: Any,
        known: Any,
        out: Any,
        state_size: Any,
    ) -> None:
        prefer_512_bits(b)
        decay, strength = (llvm.load_broadcast(b, b.add(factors, I64(i * _BYTES)), BLOCK) for i in range(2))
        places = [I64(i * BLOCK * _BYTES) for i in range(num_blocks)]
        errors = (b.fsub(load(b, value, place), b.fmul(decay, load(b, known, place))) for place in places)
        deltas = [b.fmul(strength, error) for error in errors]
        blocks, targets = (list_blocks(b, each, state_size, num_blocks) for each in (sums, target))

        def update(k: Any, totals: list[Any]) -> list[Any]:
            offset, row = b.mul(k, I64(_BYTES)), b.mul(k, I64(BLOCK * _BYTES))
            into, from_, next_ = (
                llvm.load_broadcast(b, b.add(each, offset), BLOCK) for each in (key, query, following)
            )
            before = [load(b, block, row) for block in blocks]
            added = [b.fmul(delta, into) for delta in deltas]
            after = [multiply_add(b, x, decay, new) for x, new in zip(before, added, strict=True)]
            for block, x in zip(targets, after, strict=True):
                store(b, x, block, row)
            factors = [from_] * num_blocks + [next_] * num_blocks
            return [
                multiply_add(b, x, factor, total)
                for x, factor, total in zip(after * 2, factors, totals, strict=True)
            ]

        totals = llvm.loop(b, state_size, [ZERO] * (2 * num_blocks), update)
        for i, place in enumerate(places):
            store(b, totals[i], out, place)
            store(b, totals[num_blocks + i], known, place)

    return advance


_multiply_four, _multiply_two, _multiply_one = (_multiply_blocks(num_blocks) for num_blocks in (4, 2, 1))
_advance_four, _advance_two, _advance_one = (_advance_blocks(num_blocks) for num_blocks in (4, 2, 1))


@ordered
def _multiply_key(num_blocks: int, sums: int, key: int, known: int, state_size: int) -> None:
    """Run the function of `_multiply_blocks` for the number of blocks."""
    if num_blocks == 4:
        _multiply_four(sums, key, known, state_size)
    elif num_blocks == 2:
        _multiply_two(sums, key, known, state_size)
    else:
        _multiply_one(sums, key, known, state_size)


@ordered
def _advance_token(
    num_blocks: int,
    sums: int,
    target: int,
    query: int,
    key: int,
    following: int,
    value: int,
    factors: int,
    known: int,
    out: int,
    state_size: int,
) -> None:
    """Run the function of `_advance_blocks` for the number of blocks."""
    if num_blocks == 4:
        _advance_four(sums, target, query, key, following, value, factors, known, out, state_size)
    elif num_blocks == 2:
        _advance_two(sums, target, query, key, following, value, factors, known, out, state_size)
    else:
        _advance_one(sums, target, query, key, following, value, factors, known, out, state_size)


@ordered
def _advance_channel(sums: Any, query: Any, key: Any, value: Any, decay: Any, strength: Any, p: int) -> Any:
    """Do the same for one channel, and return its output."""
    known, total = np.float32(0), np.float32(0)
    for n in range(key.shape[0]):
        known = fused(sums[n, p], key[n], known)
    delta = strength * (value - decay * known)
    for n in range(key.shape[0]):
        sums[n, p] = fused(sums[n, p], decay, delta * key[n])
        total = fused(sums[n, p], query[n], total)
    return total


def _advance(args: Any) -> None:
    num_tokens, num_seqs, num_heads, dim, num_groups, state_size = operands(args, 1, 6)
    slots_address, begins_address, slot_size, sums_address = operands(args, 7, 4)
    x_address, factors_address, out_address, targets_address, num_targets = operands(args, 11, 5)
    width, key_width = num_heads * dim, num_groups * state_size
    num_channels = width + 2 * key_width
    slots = carray(pointer(slots_address, _I64), (num_seqs,))
    begins = carray(pointer(begins_address, _I64), (num_seqs + 1,))
    x = carray(pointer(x_address, _F32), (num_tokens, num_channels))
    factors = carray(pointer(factors_address, _F32), (num_tokens, 2 * num_heads))
    out = carray(pointer(out_address, _F32), (num_tokens, width))
    num_blocks = dim // BLOCK if dim % BLOCK == 0 else 0
    targets = carray(pointer(targets_address, _I64), (num_targets,))
    known = np.empty(MAX_BLOCKS * BLOCK, np.float32)
    unit = next_unit(args)
    while unit < num_seqs * num_heads:
        sequence, head = unit // num_heads, unit % num_heads
        begin, end, first = begins[sequence], begins[sequence + 1], head * dim
        base = sums_address + first * state_size * _BYTES
        address = base + slots[sequence] * slot_size * _BYTES
        query_at = head * num_groups // num_heads * state_size
        key_at, value_at = query_at + key_width, 2 * key_width + first
        k = 0
        while k < num_blocks and begin < end:
            count, offset = count_blocks(num_blocks - k), k * state_size * BLOCK * _BYTES
            part = address + offset
            key = x_address + (begin * num_channels + key_at) * _BYTES
            _multiply_key(count, part, key, known.ctypes.data, state_size)
            for t in range(begin, end):
                row = x_address + t * num_channels * _BYTES
                query, key = row + query_at * _BYTES, row + key_at * _BYTES
                following = key + num_channels * _BYTES if t + 1 < end else key
                inputs = (query, key, following, row + (value_at + k * BLOCK) * _BYTES)
                if t + 1 < end:
                    prefetch_token(inputs[3], query, following, num_channels * _BYTES, count, state_size)
                given = factors_address + 2 * (t * num_heads + head) * _BYTES
                y = out_address + (t * width + first + k * BLOCK) * _BYTES
                into = find_target(targets, t, base + offset, slot_size, part)
                _advance_token(count, part, into, *inputs, given, known.ctypes.data, y, state_size)
                part = into
            k += count
        for t in range(begin, end if num_blocks == 0 else begin):
            into = find_target(targets, t, base, slot_size, address)
            sums, address = open_sums(address, into, state_size, dim), into
            query, key = x[t, query_at : query_at + state_size], x[t, key_at : key_at + state_size]
            values, given, y = x[t, value_at:], factors[t, 2 * head :], out[t, first:]
            for p in range(dim):
                y[p] = _advance_channel(sums, query, key, values[p], given[0], given[1], p)
        unit = next_unit(args)
    keep_alive(known)


@ordered
def _norm_gate_row(gate: Any, weight: Any, eps: Any, x: Any) -> None:
    dim = weight.shape[0]
    for first in range(0, x.shape[0], dim):
        head, own = x[first : first + dim], gate[first : first + dim]
        scale = np.float32(1) / np.sqrt(sum_squares(head) / np.float32(dim) + eps)
        for i in range(dim):
            head[i] = head[i] * scale * weight[i] * (own[i] * _sigmoid(own[i]))


def _norm_gate(args: Any) -> None:
    num_rows, width, rows_per_unit, dim, row_size, eps_bits = operands(args, 1, 6)
    gate_address, weight_address, x_address = operands(args, 7, 3)
    gates = carray(pointer(gate_address, _F32), (num_rows, row_size))
    weight = carray(pointer(weight_address, _F32), (dim,))
    x = carray(pointer(x_address, _F32), (num_rows, width))
    eps = as_float(eps_bits)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            _norm_gate_row(gates[t, :width], weight, eps, x[t])
        first = next_unit(args) * rows_per_unit


prepare, advance, norm_gate = Kernel(_prepare), Kernel(_advance), Kernel(_norm_gate)
