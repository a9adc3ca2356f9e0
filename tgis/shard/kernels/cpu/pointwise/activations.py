"""Compiled kernels of activations. One kernel contains all functions, because functions passed to kernels
would be compiled in every process. Loops are over rows, so an element runs the same code in every batch, and
its bits depend only on its value."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, operands, ordered, pointer
from tgis.shard.kernels.cpu.jit.scalar_math import exp, multiply_add
from tgis.shard.layers.activation import CLAMPED_SWIGLU

_F32 = np.float32(0)
_SILU, _GELU, _GELU_TANH, _RELU, _QUICK_GELU, _CLAMPED_SWIGLU, _RELU2 = range(7)
_LIMIT = np.float32(7)  # of the clamped gate
KINDS = {
    "silu": _SILU,
    "gelu": _GELU,
    "gelu_tanh": _GELU_TANH,
    "relu": _RELU,
    "relu2": _RELU2,
    "quick_gelu": _QUICK_GELU,
}
GATED_KINDS = {**KINDS, CLAMPED_SWIGLU: _CLAMPED_SWIGLU}


@ordered
def _silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


@ordered
def _gelu(x: Any, shrunk: Any) -> Any:
    """Return x times the probability that a standard normal variable is less than x.

    `shrunk` is e^(-x^2 / 2). The caller's loop computes it, because LLVM would not inline a longer function,
    and does not vectorise loops with calls. The probability beyond |x|, divided by `shrunk`, is approximated
    by a quotient of polynomials with a relative error of 5e-9 up to 12.5."""
    size = abs(x)
    a = np.float32(12.5) if size > np.float32(12.5) else size
    p = np.float32(0.03992635573) + a * np.float32(0.004011668488)
    p = np.float32(0.5) + a * (np.float32(0.4354524371) + a * (np.float32(0.1811344984) + a * p))
    q = np.float32(0.4639257247) + a * (np.float32(0.1000880017) + a * np.float32(0.01005561618))
    q = np.float32(1) + a * (np.float32(1.668789788) + a * (np.float32(1.193766522) + a * q))
    return multiply_add(-size * shrunk, p / q, x if x > np.float32(0) else np.float32(0))


@ordered
def _gelu_tanh(x: Any) -> Any:
    """Return x (1 + tanh y) / 2 as x / (1 + e^-2y), which avoids cancellation where tanh is near -1."""
    doubled = np.float32(1.59576912) * x * (np.float32(1) + np.float32(0.044715) * x * x)
    return x / (np.float32(1) + exp(-doubled))


@ordered
def _relu(x: Any) -> Any:
    return np.float32(0) if x < np.float32(0) else x


@ordered
def _quick_gelu(x: Any) -> Any:
    return x / (np.float32(1) + exp(np.float32(-1.702) * x))


@ordered
def _clamped_swiglu(gate: Any, up: Any) -> Any:
    gate = _LIMIT if gate > _LIMIT else gate
    up = _LIMIT if up > _LIMIT else up
    up = -_LIMIT if up < -_LIMIT else up
    return _quick_gelu(gate) * (up + np.float32(1))


@ordered
def _activate_row(kind: int, x: Any) -> None:
    if kind == _SILU:
        for i in range(x.shape[0]):
            x[i] = _silu(x[i])
    elif kind == _GELU:
        for i in range(x.shape[0]):
            x[i] = _gelu(x[i], exp(np.float32(-0.5) * x[i] * x[i]))
    elif kind == _GELU_TANH:
        for i in range(x.shape[0]):
            x[i] = _gelu_tanh(x[i])
    elif kind == _RELU:
        for i in range(x.shape[0]):
            x[i] = _relu(x[i])
    elif kind == _RELU2:
        for i in range(x.shape[0]):
            x[i] = _relu(x[i]) * _relu(x[i])
    else:
        for i in range(x.shape[0]):
            x[i] = _quick_gelu(x[i])


@ordered
def multiply_row(kind: int, gate: Any, up: Any, out: Any) -> None:
    """Write activation(gate) * up to out, all of the same size."""
    if kind == _SILU:
        for i in range(out.shape[0]):
            out[i] = _silu(gate[i]) * up[i]
    elif kind == _GELU:
        for i in range(out.shape[0]):
            out[i] = _gelu(gate[i], exp(np.float32(-0.5) * gate[i] * gate[i])) * up[i]
    elif kind == _GELU_TANH:
        for i in range(out.shape[0]):
            out[i] = _gelu_tanh(gate[i]) * up[i]
    elif kind == _RELU:
        for i in range(out.shape[0]):
            out[i] = _relu(gate[i]) * up[i]
    elif kind == _RELU2:
        for i in range(out.shape[0]):
            out[i] = _relu(gate[i]) * _relu(gate[i]) * up[i]
    elif kind == _CLAMPED_SWIGLU:
        for i in range(out.shape[0]):
            out[i] = _clamped_swiglu(gate[i], up[i])
    else:
        for i in range(out.shape[0]):
            out[i] = _quick_gelu(gate[i]) * up[i]


def _activate(args: Any) -> None:
    num_rows, size, rows_per_unit, kind, x_address = operands(args, 1, 5)
    x = carray(pointer(x_address, _F32), (num_rows, size))
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            _activate_row(kind, x[t])
        first = next_unit(args) * rows_per_unit


def _multiply_gated(args: Any) -> None:
    num_rows, size, rows_per_unit, kind, x_address, out_address = operands(args, 1, 6)
    x = carray(pointer(x_address, _F32), (num_rows, 2 * size))
    out = carray(pointer(out_address, _F32), (num_rows, size))
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            multiply_row(kind, x[t, :size], x[t, size:], out[t])
        first = next_unit(args) * rows_per_unit


activate, multiply_gated = Kernel(_activate), Kernel(_multiply_gated)
