"""Compiled kernels of Mamba 2 layers. Tokens of a sequence are computed one after the other, each as if
alone, so a token's bits do not depend on the step, the chunk of the prompt or the batch that computes it.

The sums of a head stay in the first-level cache while the tokens of a prompt pass. A token then takes few
operations compared with the products before and after it. A formulation by products of matrices, whose bits
would depend on where a prompt is cut, would save little."""

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
from tgis.shard.kernels.cpu.jit.scalar_math import exp
from tgis.shard.kernels.cpu.jit.scalar_math import multiply_add as fused
from tgis.shard.kernels.cpu.pointwise.norms import sum_squares

LANES = 16  # float32 in a vector; if registers are shorter, LLVM splits vectors, with the same results
CHANNELS = 64  # channels of the convolution per unit of work
_VECTORS = 4 if llvm.has_feature("avx512f") else 2  # accumulators that fit into registers
_BLOCK = _VECTORS * LANES
_F32, _I64 = np.float32(0), np.int64(0)
_BYTES = 4


@ordered
def _silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


@ordered
def _accumulate(x: Any, weight: Any, out: Any) -> None:
    for c in range(out.shape[0]):
        out[c] = fused(x[c], weight[c], out[c])


@ordered
def _convolve_token(x: Any, window: Any, t: int, begin: int, weight: Any, bias: Any, out: Any) -> None:
    """Compute one token's channels. x: [num_tokens, channels]. weight: [kernel_size, channels]. The window,
    [kernel_size - 1, channels], has the inputs before the sequence's first new token."""
    before = weight.shape[0] - 1
    for c in range(out.shape[0]):
        out[c] = bias[c]
    for j in range(before + 1):
        source = t - before + j
        if source >= begin:
            _accumulate(x[source], weight[j], out)
        else:
            _accumulate(window[before + source - begin], weight[j], out)
    for c in range(out.shape[0]):
        out[c] = _silu(out[c])


@ordered
def _move_window(x: Any, window: Any, begin: int, end: int) -> None:
    before = window.shape[0]
    for i in range(before):
        source = end - before + i
        if source >= begin:
            for c in range(window.shape[1]):
                window[i, c] = x[source, c]
        else:
            for c in range(window.shape[1]):
                window[i, c] = window[before + source - begin, c]


def _convolve(args: Any) -> None:
    num_tokens, num_seqs, channels, kernel_size, row_size, first_column = operands(args, 1, 6)
    slots_address, begins_address, slot_size, windows_address = operands(args, 7, 4)
    x_address, weight_address, bias_address, out_address = operands(args, 11, 4)
    slots = carray(pointer(slots_address, _I64), (num_seqs,))
    begins = carray(pointer(begins_address, _I64), (num_seqs + 1,))
    rows = carray(pointer(x_address, _F32), (num_tokens, row_size))
    weight = carray(pointer(weight_address, _F32), (kernel_size, channels))
    bias = carray(pointer(bias_address, _F32), (channels,))
    out = carray(pointer(out_address, _F32), (num_tokens, channels))
    num_parts = (channels + CHANNELS - 1) // CHANNELS
    unit = next_unit(args)
    while unit < num_seqs * num_parts:
        sequence, part = unit // num_parts, unit % num_parts
        first = part * CHANNELS
        last = min(first + CHANNELS, channels)
        begin, end = begins[sequence], begins[sequence + 1]
        address = windows_address + slots[sequence] * slot_size * _BYTES
        window = carray(pointer(address, _F32), (kernel_size - 1, channels))[:, first:last]
        x = rows[:, first_column + first : first_column + last]
        own_weight, own_bias = weight[:, first:last], bias[first:last]
        for t in range(begin, end):
            _convolve_token(x, window, t, begin, own_weight, own_bias, out[t, first:last])
        _move_window(x, window, begin, end)
        unit = next_unit(args)


@llvm_function()
def _advance_block(
    b: Any, sums: Any, x: Any, left: Any, right: Any, decay: Any, out: Any, state_size: Any, stride: Any
) -> None:
    """Advance _BLOCK channels of a head by one token: sums = sums * decay + left x^T, out = sums^T right. All
    arguments but the sizes are addresses; rows of sums are `stride` bytes apart."""
    places = [I64(v * LANES * _BYTES) for v in range(_VECTORS)]
    inputs = [llvm.load_vector(b, b.add(x, place), LANES) for place in places]
    factor = llvm.load_broadcast(b, decay, LANES)

    def build(k: Any, totals: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(_BYTES))
        into = llvm.load_broadcast(b, b.add(left, offset), LANES)
        from_ = llvm.load_broadcast(b, b.add(right, offset), LANES)
        row = b.add(sums, b.mul(k, stride))
        after = []
        for place, one, total in zip(places, inputs, totals, strict=True):
            before = llvm.load_vector(b, b.add(row, place), LANES)
            value = llvm.multiply_add(b, before, factor, b.fmul(one, into))
            llvm.store_vector(b, value, b.add(row, place))
            after.append(llvm.multiply_add(b, value, from_, total))
        return after

    totals = llvm.loop(b, state_size, [llvm.constant(0.0, LANES)] * _VECTORS, build)
    for place, total in zip(places, totals, strict=True):
        llvm.store_vector(b, total, b.add(out, place))


@ordered
def _advance_channel(sums: Any, x: Any, left: Any, right: Any, decay: Any, p: int) -> Any:
    """Do the same for one channel."""
    total = np.float32(0)
    for n in range(left.shape[0]):
        sums[n, p] = fused(sums[n, p], decay, x * left[n])
        total = fused(sums[n, p], right[n], total)
    return total


@ordered
def _find_step(x: Any, shortest: Any, longest: Any) -> Any:
    """Return softplus(x), clamped."""
    step = x if x > np.float32(20) else np.float32(np.log1p(np.exp(np.float64(x))))
    return min(max(step, shortest), longest)


def _scan(args: Any) -> None:
    num_tokens, num_seqs, num_heads, dim, num_groups, state_size, row_size = operands(args, 1, 7)
    slots_address, begins_address, slot_size, sums_address = operands(args, 8, 4)
    x_address, rows_address, decay_address, bias_address, skip_address = operands(args, 12, 5)
    min_bits, max_bits, out_address = operands(args, 17, 3)
    width, group_width = num_heads * dim, num_groups * state_size
    slots = carray(pointer(slots_address, _I64), (num_seqs,))
    begins = carray(pointer(begins_address, _I64), (num_seqs + 1,))
    x = carray(pointer(x_address, _F32), (num_tokens, width + 2 * group_width))
    rows = carray(pointer(rows_address, _F32), (num_tokens, row_size))
    decays = carray(pointer(decay_address, _F32), (num_heads,))
    biases = carray(pointer(bias_address, _F32), (num_heads,))
    skips = carray(pointer(skip_address, _F32), (num_heads,))
    out = carray(pointer(out_address, _F32), (num_tokens, width))
    shortest, longest = as_float(min_bits), as_float(max_bits)
    num_whole = dim // _BLOCK * _BLOCK
    scaled, decay = np.empty(dim, np.float32), np.empty(1, np.float32)
    unit = next_unit(args)
    while unit < num_seqs * num_heads:
        sequence, head = unit // num_heads, unit % num_heads
        size = state_size * dim
        address = sums_address + (slots[sequence] * slot_size + head * size) * _BYTES
        sums = carray(pointer(address, _F32), (state_size, dim))
        first = head * dim
        left_at = width + head * num_groups // num_heads * state_size
        right_at = left_at + group_width
        for t in range(begins[sequence], begins[sequence + 1]):
            step = _find_step(rows[t, row_size - num_heads + head] + biases[head], shortest, longest)
            decay[0] = exp(step * decays[head])
            for p in range(dim):
                scaled[p] = x[t, first + p] * step
            left, right = x[t, left_at : left_at + state_size], x[t, right_at : right_at + state_size]
            for p in range(0, num_whole, _BLOCK):
                _advance_block(
                    address + p * _BYTES,
                    scaled.ctypes.data + p * _BYTES,
                    left.ctypes.data,
                    right.ctypes.data,
                    decay.ctypes.data,
                    out_address + (t * width + first + p) * _BYTES,
                    state_size,
                    dim * _BYTES,
                )
            for p in range(num_whole, dim):
                out[t, first + p] = _advance_channel(sums, scaled[p], left, right, decay[0], p)
            for p in range(dim):
                out[t, first + p] = fused(x[t, first + p], skips[head], out[t, first + p])
        unit = next_unit(args)
    keep_alive(scaled)
    keep_alive(decay)


@ordered
def _gate_norm_row(gate: Any, weight: Any, eps: Any, num_groups: int, x: Any) -> None:
    size = x.shape[0] // num_groups
    for i in range(x.shape[0]):
        x[i] *= _silu(gate[i])
    for first in range(0, x.shape[0], size):
        part = x[first : first + size]
        scale = np.float32(1) / np.sqrt(sum_squares(part) / np.float32(size) + eps)
        for i in range(size):
            part[i] = part[i] * scale * weight[first + i]


def _gate_norm(args: Any) -> None:
    num_rows, width, rows_per_unit, num_groups, row_size, eps_bits = operands(args, 1, 6)
    gate_address, weight_address, x_address = operands(args, 7, 3)
    gates = carray(pointer(gate_address, _F32), (num_rows, row_size))
    weight = carray(pointer(weight_address, _F32), (width,))
    x = carray(pointer(x_address, _F32), (num_rows, width))
    eps = as_float(eps_bits)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            _gate_norm_row(gates[t, :width], weight, eps, num_groups, x[t])
        first = next_unit(args) * rows_per_unit


convolve, scan, gate_norm = Kernel(_convolve), Kernel(_scan), Kernel(_gate_norm)
