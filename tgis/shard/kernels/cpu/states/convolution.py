"""Compiled kernel of the causal convolution of recurrent layers, with the activation after it. A token's bits
do not depend on the step that computes it, nor on the part of the channels that a thread has."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    keep_alive,
    llvm_function,
    next_unit,
    operands,
    ordered,
    pointer,
)
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, multiply_add, prefer_512_bits, silu
from tgis.shard.kernels.cpu.states.blocks import prefetch_inputs

CHANNELS = 256  # channels per unit of work
_VECTORS = 4  # vectors of channels that are computed together
_AHEAD = 2  # tokens between the prefetch and the use of inputs
_F32, _I64 = np.float32(0), np.int64(0)
_BYTES = 4


@ordered
def _copy(x: Any, out: Any) -> None:
    for c in range(out.shape[0]):
        out[c] = x[c]


@llvm_function()
def _convolve_token(
    b: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    weight_stride: Any,
    bias: Any,
    out: Any,
    num_channels: Any,
    kernel_size: Any,
) -> None:
    """Compute channels of a token: silu of the bias plus the products of `kernel_size` rows of x and of the
    weights. Arguments are addresses, numbers, and the bytes between rows."""
    prefer_512_bits(b)

    def add_columns(first: Any, num_vectors: int, mask: Any) -> None:
        places = [b.mul(b.add(first, I64(v * LANES)), I64(_BYTES)) for v in range(num_vectors)]
        begins = [llvm.load_vector(b, b.add(bias, place), LANES, mask) for place in places]

        def add_row(j: Any, totals: list[Any]) -> list[Any]:
            inputs, factors = b.add(x, b.mul(j, x_stride)), b.add(weight, b.mul(j, weight_stride))
            return [
                multiply_add(
                    b,
                    llvm.load_vector(b, b.add(inputs, place), LANES, mask),
                    llvm.load_vector(b, b.add(factors, place), LANES, mask),
                    total,
                )
                for place, total in zip(places, totals, strict=True)
            ]

        for place, total in zip(places, llvm.loop(b, kernel_size, begins, add_row), strict=True):
            llvm.store_vector(b, silu(b, total), b.add(out, place), mask)

    def add_many(first: Any, _: list[Any]) -> list[Any]:
        add_columns(first, _VECTORS, None)
        return []

    def add_few(first: Any, _: list[Any]) -> list[Any]:
        add_columns(first, 1, llvm.first_lanes(b, b.sub(num_channels, first), LANES))
        return []

    size = _VECTORS * LANES
    whole = b.sub(num_channels, b.srem(num_channels, I64(size)))
    llvm.loop_range(b, I64(0), whole, size, [], add_many)
    llvm.loop_range(b, whole, num_channels, LANES, [], add_few)


@ordered
def _move_window(
    rows: Any, column: int, window: Any, target: Any, begin: int, end: int, first: int, last: int
) -> None:
    """Set channels first ... last of `target`, which may be `window`, to the newest inputs before `end`."""
    before = window.shape[0]
    for i in range(before):
        source = end - before + i
        if source >= begin:
            _copy(rows[source, column + first : column + last], target[i, first:last])
        else:
            _copy(window[before + source - begin, first:last], target[i, first:last])


def _convolve(args: Any) -> None:
    num_tokens, num_seqs, channels, kernel_size, row_size, column = operands(args, 1, 6)
    slots_address, begins_address, slot_size, windows_address = operands(args, 7, 4)
    x_address, weight_address, bias_address, out_address = operands(args, 11, 4)
    targets_address, num_targets = operands(args, 15, 2)
    slots = carray(pointer(slots_address, _I64), (num_seqs,))
    begins = carray(pointer(begins_address, _I64), (num_seqs + 1,))
    targets = carray(pointer(targets_address, _I64), (num_targets,))
    rows = carray(pointer(x_address, _F32), (num_tokens, row_size))
    num_parts = (channels + CHANNELS - 1) // CHANNELS
    before = kernel_size - 1
    # Inputs of the window, followed by those of the tokens that need it.
    early = np.empty((2 * before + 1, CHANNELS), np.float32)
    unit = next_unit(args)
    while unit < num_seqs * num_parts:
        sequence = unit // num_parts
        first = unit % num_parts * CHANNELS
        last = min(first + CHANNELS, channels)
        begin = begins[sequence]
        end = begins[sequence + 1]
        slot = slots[sequence]
        window = carray(pointer(windows_address + slot * slot_size * _BYTES, _F32), (before, channels))
        for i in range(before if end > begin else 0):
            _copy(window[i, first:last], early[i, : last - first])
        for t in range(begin, min(end, begin + before)):
            _copy(rows[t, column + first : column + last], early[before + t - begin, : last - first])
        for t in range(begin, end):
            x = early.ctypes.data + (t - begin) * CHANNELS * _BYTES
            stride = CHANNELS * _BYTES
            if t >= begin + before:
                x = x_address + ((t - before) * row_size + column + first) * _BYTES
                stride = row_size * _BYTES
            if t + _AHEAD < end:
                ahead = x_address + ((t + _AHEAD) * row_size + column + first) * _BYTES
                prefetch_inputs(ahead, (last - first) * _BYTES)
            weight, bias = weight_address + first * _BYTES, bias_address + first * _BYTES
            out = out_address + (t * channels + first) * _BYTES
            _convolve_token(x, stride, weight, channels * _BYTES, bias, out, last - first, kernel_size)
        for t in range(begin if num_targets else end, end):
            if targets[t] != slot:
                address = windows_address + targets[t] * slot_size * _BYTES
                target = carray(pointer(address, _F32), (before, channels))
                _move_window(rows, column, window, target, begin, t + 1, first, last)
        if end > begin and (num_targets == 0 or targets[end - 1] == slot):
            _move_window(rows, column, window, window, begin, end, first, last)
        unit = next_unit(args)
    keep_alive(early)


convolve = Kernel(_convolve)
