"""The work between matrix products as compiled kernels: norms, activations, rotation. Rows never meet, and
a row's arithmetic follows from its width alone, so its bits are the same in any company.

Only sums over one array may be reordered. A loop over several is compiled twice, for arrays that lie near
each other and for others, and the two must not choose orders of their own."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.compiled import Kernel, as_float, inner, ordered, pointer, take
from tgis.shard.numeric import exp

_F32, _I64 = np.float32(0), np.int64(0)


@inner
def _sum_squares(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@ordered
def _rms_norm_row(x: Any, delta: Any, weight: Any, eps: Any, out: Any, t: int) -> None:
    size = weight.shape[0]
    if delta.size:
        for i in range(size):
            x[t, i] += delta[t, i]
    scale = np.float32(1) / np.sqrt(_sum_squares(x[t]) / np.float32(size) + eps)
    for i in range(size):
        out[t, i] = x[t, i] * scale * weight[i]


def _rms_norm(args: Any) -> None:
    a = carray(args, 9)
    num_rows, size, rows_per_unit = a[1], a[2], a[3]
    x = carray(pointer(a[4], _F32), (num_rows, size))
    delta = carray(pointer(a[5], _F32), (num_rows if a[5] else 0, size))
    weight = carray(pointer(a[6], _F32), (size,))
    out = carray(pointer(a[7], _F32), (num_rows, size))
    eps = as_float(a[8])
    first = take(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            _rms_norm_row(x, delta, weight, eps, out, t)
        first = take(args) * rows_per_unit


@ordered
def _silu_multiply_row(gate: Any, up: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = gate[i] / (np.float32(1) + exp(-gate[i])) * up[i]


def _silu_multiply(args: Any) -> None:
    a = carray(args, 6)
    num_rows, size, rows_per_unit = a[1], a[2], a[3]
    x = carray(pointer(a[4], _F32), (num_rows, 2 * size))
    out = carray(pointer(a[5], _F32), (num_rows, size))
    first = take(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            _silu_multiply_row(x[t, :size], x[t, size:], out[t])
        first = take(args) * rows_per_unit


def _angles(args: Any) -> None:
    a = carray(args, 7)
    num_rows, half = a[1], a[2]
    positions = carray(pointer(a[3], _I64), (num_rows,))
    inv_freq = carray(pointer(a[4], _F32), (half,))
    out = carray(pointer(a[5], _F32), (2, num_rows, half))
    scale = as_float(a[6])
    t = take(args)
    while t < num_rows:
        for i in range(half):
            angle = np.float32(positions[t]) * inv_freq[i]
            out[0, t, i], out[1, t, i] = np.cos(angle) * scale, np.sin(angle) * scale
        t = take(args)


@ordered
def _turn_heads(x: Any, cosines: Any, sines: Any, out: Any) -> None:
    """x: [num_heads * head_dim] -> out: [num_heads, head_dim]; channels behind the turned ones are copied."""
    heads, dim = out.shape
    half = cosines.shape[0]
    for h in range(heads):
        source, target = x[h * dim : (h + 1) * dim], out[h]
        for i in range(half):
            one, other = source[i], source[i + half]
            target[i] = one * cosines[i] - other * sines[i]
            target[i + half] = other * cosines[i] + one * sines[i]
        for i in range(2 * half, dim):
            target[i] = source[i]


def _split_heads(args: Any) -> None:
    a = carray(args, 12)
    num_rows, heads, kv_heads, dim, half, rows_per_unit = a[1], a[2], a[3], a[4], a[5], a[6]
    x = carray(pointer(a[7], _F32), (num_rows, (heads + 2 * kv_heads) * dim))
    angles = carray(pointer(a[8], _F32), (2, num_rows, half))
    q = carray(pointer(a[9], _F32), (num_rows, heads, dim))
    k = carray(pointer(a[10], _F32), (num_rows, kv_heads, dim))
    v = carray(pointer(a[11], _F32), (num_rows, kv_heads, dim))
    first = take(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            _turn_heads(x[t], angles[0, t], angles[1, t], q[t])
            _turn_heads(x[t, heads * dim :], angles[0, t], angles[1, t], k[t])
            _turn_heads(x[t, (heads + kv_heads) * dim :], angles[0, t, :0], angles[1, t, :0], v[t])
        first = take(args) * rows_per_unit


rms_norm, silu_multiply, angles, split_heads = (
    Kernel(function) for function in (_rms_norm, _silu_multiply, _angles, _split_heads)
)
