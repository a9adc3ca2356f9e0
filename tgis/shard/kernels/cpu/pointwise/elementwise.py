"""Compiled kernel of elementwise operations in place: add, scale all rows or each row, clamp, soft cap,
multiply by a sigmoid, copy."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_float, next_unit, operands, ordered, pointer
from tgis.shard.kernels.cpu.jit.scalar_math import exp, tanh

_F32 = np.float32(0)
_ADD, _SCALE, _CLAMP, _SOFT_CAP, _SCALE_ROWS, _MULTIPLY_SIGMOID, _COPY = range(7)
KINDS = {
    "add": _ADD,
    "scale": _SCALE,
    "clamp": _CLAMP,
    "soft_cap": _SOFT_CAP,
    "scale_rows": _SCALE_ROWS,
    "multiply_sigmoid": _MULTIPLY_SIGMOID,
    "copy": _COPY,
}


@ordered
def _change_row(kind: int, x: Any, other: Any, number: Any) -> None:
    if kind == _ADD:
        for i in range(x.shape[0]):
            x[i] += other[i]
    elif kind == _COPY:
        for i in range(x.shape[0]):
            x[i] = other[i]
    elif kind == _SCALE:
        for i in range(x.shape[0]):
            x[i] *= number
    elif kind == _SCALE_ROWS:
        for i in range(x.shape[0]):
            x[i] *= other[0]
    elif kind == _MULTIPLY_SIGMOID:
        for i in range(x.shape[0]):
            x[i] /= np.float32(1) + exp(-other[i])
    elif kind == _CLAMP:
        for i in range(x.shape[0]):
            # These comparisons keep NaN.
            low = -number if x[i] < -number else x[i]
            x[i] = number if low > number else low
    else:
        for i in range(x.shape[0]):
            x[i] = tanh(x[i] / number) * number


def _change(args: Any) -> None:
    num_rows, size, rows_per_unit, kind = operands(args, 1, 4)
    x_address, x_pitch, other_address, other_pitch, bits = operands(args, 5, 5)
    pitch, stride = 4 * x_pitch, 4 * other_pitch  # bytes between rows of x and of other
    number = as_float(bits)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            x = carray(pointer(x_address + t * pitch, _F32), (size,))
            other = carray(pointer(other_address + t * stride, _F32), (size if other_address else 0,))
            _change_row(kind, x, other, number)
        first = next_unit(args) * rows_per_unit


change = Kernel(_change)
