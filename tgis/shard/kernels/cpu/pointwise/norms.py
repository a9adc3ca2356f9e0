"""Compiled kernels of norms. Rows are independent, and a row's arithmetic depends only on its width, so its
bits are the same in every batch.

Results may be rounded to bfloat16, for products that would round them.

Only sums over one array may be reordered. LLVM compiles a loop over several arrays twice, for overlapping and
for separate arrays, and both versions must add in the same order."""

from typing import Any

import numpy as np
import torch
from numba import carray

from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    as_float,
    next_unit,
    operands,
    ordered,
    pointer,
    reorderable,
)
from tgis.shard.kernels.cpu.jit.scalar_math import ELEMENTS, stored

_F32 = np.float32(0)


@reorderable
def sum_squares(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@reorderable
def _mean(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i]
    return total / np.float32(x.shape[0])


@reorderable
def _variance(x: Any, mean: Any) -> Any:
    """Return the variance, computed in a second pass because a difference of sums loses digits for a large
    mean."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += (x[i] - mean) * (x[i] - mean)
    return total / np.float32(x.shape[0])


@ordered
def _rms_norm_row(x: Any, delta: Any, weight: Any, eps: Any, out: Any, t: int, element: Any) -> None:
    size = weight.shape[0]
    if delta.size:
        for i in range(size):
            x[t, i] += delta[t, i]
    scale = np.float32(1) / np.sqrt(sum_squares(x[t]) / np.float32(size) + eps)
    for i in range(size):
        out[t, i] = stored(x[t, i] * scale * weight[i], element)


def _rms_norm_kernel(element: Any) -> Kernel:
    def rms_norm(args: Any) -> None:
        num_rows, size, rows_per_unit = operands(args, 1, 3)
        x_address, delta_address, weight_address, out_address, eps_bits = operands(args, 4, 5)
        x = carray(pointer(x_address, _F32), (num_rows, size))
        delta = carray(pointer(delta_address, _F32), (num_rows if delta_address else 0, size))
        weight = carray(pointer(weight_address, _F32), (size,))
        out = carray(pointer(out_address, element), (num_rows, size))
        eps = as_float(eps_bits)
        first = next_unit(args) * rows_per_unit
        while first < num_rows:
            for t in range(first, min(num_rows, first + rows_per_unit)):
                _rms_norm_row(x, delta, weight, eps, out, t, element)
            first = next_unit(args) * rows_per_unit

    return Kernel(rms_norm)


@ordered
def _layer_norm_row(
    x: Any, delta: Any, weight: Any, bias: Any, eps: Any, out: Any, t: int, element: Any
) -> None:
    size = weight.shape[0]
    if delta.size:
        for i in range(size):
            x[t, i] += delta[t, i]
    mean = _mean(x[t])
    scale = np.float32(1) / np.sqrt(_variance(x[t], mean) + eps)
    if bias.size:
        for i in range(size):
            out[t, i] = stored((x[t, i] - mean) * scale * weight[i] + bias[i], element)
    else:
        for i in range(size):
            out[t, i] = stored((x[t, i] - mean) * scale * weight[i], element)


def _layer_norm_kernel(element: Any) -> Kernel:
    def layer_norm(args: Any) -> None:
        num_rows, size, rows_per_unit = operands(args, 1, 3)
        x_address, delta_address, weight_address, bias_address, out_address, eps_bits = operands(args, 4, 6)
        x = carray(pointer(x_address, _F32), (num_rows, size))
        delta = carray(pointer(delta_address, _F32), (num_rows if delta_address else 0, size))
        weight = carray(pointer(weight_address, _F32), (size,))
        bias = carray(pointer(bias_address, _F32), (size if bias_address else 0,))
        out = carray(pointer(out_address, element), (num_rows, size))
        eps = as_float(eps_bits)
        first = next_unit(args) * rows_per_unit
        while first < num_rows:
            for t in range(first, min(num_rows, first + rows_per_unit)):
                _layer_norm_row(x, delta, weight, bias, eps, out, t, element)
            first = next_unit(args) * rows_per_unit

    return Kernel(layer_norm)


_TYPES = torch.float32, torch.bfloat16  # of results
RMS_NORM = {dtype: _rms_norm_kernel(ELEMENTS[dtype]) for dtype in _TYPES}
LAYER_NORM = {dtype: _layer_norm_kernel(ELEMENTS[dtype]) for dtype in _TYPES}
