"""Compiled kernels that compute rotary angles, and that split rows of qkv into heads with head norms and
rotary embeddings. A row's bits depend only on its values and the sizes. As in `norms.py`, only sums over one
array may be reordered."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_float, next_unit, operands, ordered, pointer
from tgis.shard.kernels.cpu.pointwise.norms import sum_squares

_F32, _I64 = np.float32(0), np.int64(0)


def _angles(args: Any) -> None:
    num_rows, half, num_sets, positions_address, inv_freq_address = operands(args, 1, 5)
    amplitudes_address, sets_address, growth_address, out_address = operands(args, 6, 4)
    positions = carray(pointer(positions_address, _I64), (num_rows,))
    inv_freq = carray(pointer(inv_freq_address, _F32), (num_sets, half))
    amplitudes = carray(pointer(amplitudes_address, _F32), (num_sets,))
    factor_sets = carray(pointer(sets_address, _I64), (num_rows if sets_address else 0,))
    growth = carray(pointer(growth_address, _F32), (num_rows if growth_address else 0,))
    out = carray(pointer(out_address, _F32), (2, num_rows, half))
    t = next_unit(args)
    while t < num_rows:
        chosen = factor_sets[t] if factor_sets.size else 0
        stretch = np.log(np.float64(growth[t])) / max(half - 1, 1) if growth.size else 0.0
        for i in range(half):
            frequency = inv_freq[chosen, i]
            if stretch != 0:
                frequency = np.float32(frequency * np.exp(-stretch * i))
            angle = np.float32(positions[t]) * frequency
            out[0, t, i] = np.cos(angle) * amplitudes[chosen]
            out[1, t, i] = np.sin(angle) * amplitudes[chosen]
        t = next_unit(args)


@ordered
def _normalise_heads(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Apply an RMS norm to each head. x, out: [num_heads * head_dim]."""
    dim = weight.shape[0]
    for h in range(0, x.shape[0], dim):
        source, target = x[h : h + dim], out[h : h + dim]
        scale = np.float32(1) / np.sqrt(sum_squares(source) / np.float32(dim) + eps)
        for i in range(dim):
            target[i] = source[i] * scale * weight[i]


@ordered
def _rotate_heads(x: Any, dim: int, cosines: Any, sines: Any, out: Any) -> None:
    """Apply rotary embeddings to heads. x, out: [num_heads * dim]. Other channels are copied."""
    half = cosines.shape[0]
    for h in range(0, x.shape[0] if half else 0, dim):
        source, target = x[h : h + dim], out[h : h + dim]
        for i in range(half):
            one = source[i]
            other = source[i + half]
            target[i] = one * cosines[i] - other * sines[i]
            target[i + half] = other * cosines[i] + one * sines[i]
        for i in range(2 * half, dim):
            target[i] = source[i]
    if half == 0:
        for i in range(x.shape[0]):
            out[i] = x[i]


def _split_heads(args: Any) -> None:
    num_rows, heads, kv_heads, dim, half, rows_per_unit = operands(args, 1, 6)
    x_address, x_pitch, angles_address, q_address, k_address, v_address = operands(args, 7, 6)
    q_weight_address, k_weight_address, v_weight_address, eps_bits = operands(args, 13, 4)
    q_size, kv_size = heads * dim, kv_heads * dim
    x = carray(pointer(x_address, _F32), (num_rows, x_pitch))
    angles = carray(pointer(angles_address, _F32), (2, num_rows, half))
    q = carray(pointer(q_address, _F32), (num_rows, q_size))
    k = carray(pointer(k_address, _F32), (num_rows, kv_size))
    v = carray(pointer(v_address, _F32), (num_rows, kv_size))
    q_weight = carray(pointer(q_weight_address, _F32), (dim if q_weight_address else 0,))
    k_weight = carray(pointer(k_weight_address, _F32), (dim if k_weight_address else 0,))
    v_weight = carray(pointer(v_weight_address, _F32), (dim if v_weight_address else 0,))
    eps = as_float(eps_bits)
    normed = np.empty(q_size + 2 * kv_size if q_weight_address else 0, np.float32)
    first = next_unit(args) * rows_per_unit
    while first < num_rows:
        for t in range(first, min(num_rows, first + rows_per_unit)):
            row = x[t]
            values = x[t, q_size + kv_size : q_size + 2 * kv_size]
            if normed.size:
                _normalise_heads(row[:q_size], q_weight, eps, normed[:q_size])
                _normalise_heads(row[q_size : q_size + kv_size], k_weight, eps, normed[q_size:])
                if v_weight.size:
                    _normalise_heads(values, v_weight, eps, normed[q_size + kv_size :])
                    values = normed[q_size + kv_size :]
                row = normed
            _rotate_heads(row[:q_size], dim, angles[0, t], angles[1, t], q[t])
            _rotate_heads(row[q_size : q_size + kv_size], dim, angles[0, t], angles[1, t], k[t])
            _rotate_heads(values, dim, angles[0, t, :0], angles[1, t, :0], v[t])
        first = next_unit(args) * rows_per_unit


angles, split_heads = Kernel(_angles), Kernel(_split_heads)
