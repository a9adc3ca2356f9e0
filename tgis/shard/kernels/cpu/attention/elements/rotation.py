"""Rotation of keys and queries by a Hadamard matrix, as in QuaRot (arXiv:2404.00456). It changes no product
of a query and a key, but spreads channels with large magnitudes over all channels, so that one scale for a
key loses less. The matrix has entries 1 and -1: the product of rotated vectors is `count_rotated` times
larger.

Sums have a fixed order, that of the fast transform: neighbours first, then channels twice as far apart."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered, pointer
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, VECTOR, load, multiply_add, store

_F32 = np.float32(0)


@ordered
def count_rotated(head_dim: int) -> int:
    """Return the number of adjacent channels that are rotated together: the largest power of two that divides
    `head_dim`."""
    return head_dim & -head_dim


@ordered
def rotate(x: int, head_dim: int) -> None:
    """Rotate the vector of `head_dim` float32 at address `x` in place."""
    end = count_rotated(head_dim)
    half = 1
    if head_dim % LANES == 0:
        _rotate_lanes(x, head_dim // LANES)
        half = LANES
    while half < end:
        for begin in range(0, head_dim, 2 * half):
            if half >= LANES:
                for d in range(begin, begin + half, LANES):
                    _add_and_subtract(x + 4 * d, x + 4 * (d + half))
            else:
                _rotate_pairs(x + 4 * begin, half)
        half *= 2


@ordered
def _rotate_pairs(x: int, half: int) -> None:
    y = carray(pointer(x, _F32), (2 * half,))
    for d in range(half):
        first = y[d]
        y[d] = first + y[d + half]
        y[d + half] = first - y[d + half]


@llvm_function()
def _rotate_lanes(b: Any, x: Any, num_vectors: Any) -> None:
    """Add and subtract lanes within each vector."""

    def rotate_vector(k: Any, _: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(4 * LANES))
        values = load(b, x, offset)
        half = 1
        while half < LANES:
            others = llvm.shuffle(b, values, values, [lane ^ half for lane in range(LANES)])
            signs = ir.Constant(VECTOR, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
            values = multiply_add(b, values, signs, others)
            half *= 2
        store(b, values, x, offset)
        return []

    llvm.loop(b, num_vectors, [], rotate_vector)


@llvm_function()
def _add_and_subtract(b: Any, first: Any, second: Any) -> None:
    """Replace two vectors at addresses by their sum and their difference."""
    x, y = load(b, first, I64(0)), load(b, second, I64(0))
    store(b, b.fadd(x, y), first, I64(0))
    store(b, b.fsub(x, y), second, I64(0))
