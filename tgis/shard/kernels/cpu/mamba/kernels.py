"""Compiled kernels of Mamba 2 layers. Tokens of a sequence are computed one after the other, each as if
alone, so a token's bits do not depend on the step, the chunk of the prompt or the batch that computes it.

The sums of some channels stay in the first-level cache while the tokens of a prompt pass. In float32,
products of matrices for chunks of tokens would need as many multiplications, and states that also keep the
inputs of an incomplete chunk."""

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
    count_blocks,
    find_target,
    list_blocks,
    open_sums,
    prefetch_token,
)
from tgis.shard.layers.states import Gating
from tgis.shard.memory.state_cache import BLOCK

BEFORE_NORM, AFTER_NORM, NO_NORM = range(3)
GATINGS: dict[Gating, int] = {"before_norm": BEFORE_NORM, "after_norm": AFTER_NORM, "no_norm": NO_NORM}
_F32, _I64 = np.float32(0), np.int64(0)
_BYTES = 4


@ordered
def _silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


def _advance_blocks(num_blocks: int) -> Any:
    """Return a function that advances blocks of a head by a token: target = sums * decay + left (step x)^T,
    and out = target^T right + skip x. Its arguments are addresses, `factors` that of decay, step and skip.
    `target` may be `sums`."""

    @llvm_function()
    def advance(
        b: Any,
        sums: Any,
        target: Any,
        x: Any,
        left: Any,
        right: Any,
        factors: Any,
        out: Any,
        state_size: Any,
    ) -> None:
        prefer_512_bits(b)
        places = [I64(i * BLOCK * _BYTES) for i in range(num_blocks)]
        decay, step, skip = (llvm.load_broadcast(b, b.add(factors, I64(i * _BYTES)), BLOCK) for i in range(3))
        inputs = [load(b, x, place) for place in places]
        scaled = [b.fmul(one, step) for one in inputs]
        blocks, targets = (list_blocks(b, each, state_size, num_blocks) for each in (sums, target))

        def build(k: Any, totals: list[Any]) -> list[Any]:
            offset, row = b.mul(k, I64(_BYTES)), b.mul(k, I64(BLOCK * _BYTES))
            into = llvm.load_broadcast(b, b.add(left, offset), BLOCK)
            from_ = llvm.load_broadcast(b, b.add(right, offset), BLOCK)
            before = [load(b, block, row) for block in blocks]
            added = [b.fmul(one, into) for one in scaled]
            after = [multiply_add(b, old, decay, new) for old, new in zip(before, added, strict=True)]
            for block, value in zip(targets, after, strict=True):
                store(b, value, block, row)
            return [multiply_add(b, value, from_, total) for value, total in zip(after, totals, strict=True)]

        totals = llvm.loop(b, state_size, [ZERO] * num_blocks, build)
        for place, one, total in zip(places, inputs, totals, strict=True):
            store(b, multiply_add(b, one, skip, total), out, place)

    return advance


_advance_four, _advance_two, _advance_one = (_advance_blocks(num_blocks) for num_blocks in (4, 2, 1))


@ordered
def _advance(
    num_blocks: int,
    sums: int,
    target: int,
    x: int,
    left: int,
    right: int,
    factors: int,
    out: int,
    state_size: int,
) -> None:
    """Run the function of `_advance_blocks` for the number of blocks."""
    if num_blocks == 4:
        _advance_four(sums, target, x, left, right, factors, out, state_size)
    elif num_blocks == 2:
        _advance_two(sums, target, x, left, right, factors, out, state_size)
    else:
        _advance_one(sums, target, x, left, right, factors, out, state_size)


@ordered
def _advance_channel(sums: Any, x: Any, left: Any, right: Any, factors: Any, p: int) -> Any:
    """Do the same for one channel, and return its output."""
    total, scaled = np.float32(0), x * factors[1]
    for n in range(left.shape[0]):
        sums[n, p] = fused(sums[n, p], factors[0], scaled * left[n])
        total = fused(sums[n, p], right[n], total)
    return fused(x, factors[2], total)


@ordered
def _find_step(x: Any, min_bits: int, max_bits: int) -> Any:
    """Return softplus(x), clamped to bounds, given as bits."""
    return min(max(softplus(x), as_float(min_bits)), as_float(max_bits))


def _scan(args: Any) -> None:
    num_tokens, num_seqs, num_heads, dim, num_groups, state_size, row_size = operands(args, 1, 7)
    slots_address, begins_address, slot_size, sums_address = operands(args, 8, 4)
    x_address, rows_address, decay_address, bias_address, skip_address = operands(args, 12, 5)
    min_bits, max_bits, out_address, targets_address, num_targets = operands(args, 17, 5)
    width, num_channels = num_heads * dim, num_heads * dim + 2 * num_groups * state_size
    slots = carray(pointer(slots_address, _I64), (num_seqs,))
    begins = carray(pointer(begins_address, _I64), (num_seqs + 1,))
    x = carray(pointer(x_address, _F32), (num_tokens, num_channels))
    rows = carray(pointer(rows_address, _F32), (num_tokens, row_size))
    decays = carray(pointer(decay_address, _F32), (num_heads,))
    biases = carray(pointer(bias_address, _F32), (num_heads,))
    skips = carray(pointer(skip_address, _F32), (num_heads,))
    out = carray(pointer(out_address, _F32), (num_tokens, width))
    num_blocks = dim // BLOCK if dim % BLOCK == 0 else 0
    targets = carray(pointer(targets_address, _I64), (num_targets,))
    factors = np.empty((num_tokens, 3), np.float32)
    unit = next_unit(args)
    while unit < num_seqs * num_heads:
        sequence, head = unit // num_heads, unit % num_heads
        begin, end, first = begins[sequence], begins[sequence + 1], head * dim
        base = sums_address + first * state_size * _BYTES
        address = base + slots[sequence] * slot_size * _BYTES
        left_at = width + head * num_groups // num_heads * state_size
        right_at = left_at + num_groups * state_size
        for t in range(begin, end):
            step = _find_step(rows[t, row_size - num_heads + head] + biases[head], min_bits, max_bits)
            factors[t, 0], factors[t, 1], factors[t, 2] = exp(step * decays[head]), step, skips[head]
        k = 0
        while k < num_blocks:
            count, offset = count_blocks(num_blocks - k), k * state_size * BLOCK * _BYTES
            part = address + offset
            for t in range(begin, end):
                row, place = x_address + t * num_channels * _BYTES, (first + k * BLOCK) * _BYTES
                inputs = (row + place, row + left_at * _BYTES, row + right_at * _BYTES)
                if t + 1 < end:
                    prefetch_token(*inputs, num_channels * _BYTES, count, state_size)
                given, y = factors.ctypes.data + 3 * t * _BYTES, out_address + t * width * _BYTES + place
                into = find_target(targets, t, base + offset, slot_size, part)
                _advance(count, part, into, *inputs, given, y, state_size)
                part = into
            k += count
        for t in range(begin, end if num_blocks == 0 else begin):
            into = find_target(targets, t, base, slot_size, address)
            sums, address = open_sums(address, into, state_size, dim), into
            left, right = x[t, left_at : left_at + state_size], x[t, right_at : right_at + state_size]
            for p in range(dim):
                out[t, first + p] = _advance_channel(sums, x[t, first + p], left, right, factors[t], p)
        unit = next_unit(args)
    keep_alive(factors)


@ordered
def _gate_row(gate: Any, x: Any) -> None:
    for i in range(x.shape[0]):
        x[i] *= _silu(gate[i])


@ordered
def _norm_row(weight: Any, eps: Any, num_groups: int, x: Any) -> None:
    size = x.shape[0] // num_groups
    for first in range(0, x.shape[0], size):
        part = x[first : first + size]
        scale = np.float32(1) / np.sqrt(sum_squares(part) / np.float32(size) + eps)
        for i in range(size):
            part[i] = part[i] * scale * weight[first + i]


def _gate_norm(args: Any) -> None:
    num_rows, width, rows_per_unit, num_groups, row_size, eps_bits, gating = operands(args, 1, 7)
    gate_address, weight_address, x_address = operands(args, 8, 3)
    gates = carray(pointer(gate_address, _F32), (num_rows, row_size))
    weight = carray(pointer(weight_address, _F32), (width,))
    x = carray(pointer(x_address, _F32), (num_rows, width))
    eps = as_float(eps_bits)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            if gating != AFTER_NORM:
                _gate_row(gates[t, :width], x[t])
            if gating != NO_NORM:
                _norm_row(weight, eps, num_groups, x[t])
            if gating == AFTER_NORM:
                _gate_row(gates[t, :width], x[t])
        first = next_unit(args) * rows_per_unit


scan, gate_norm = Kernel(_scan), Kernel(_gate_norm)
