"""Scalar arithmetic for compiled kernels. It uses LLVM code where numba would widen integers to 64 bits,
which would prevent vectorisation."""

from typing import Any

import numpy as np
import torch
from numba import types

from tgis.shard.kernels.cpu.jit.compiler import intrinsic, llvm_function, ordered
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, HALF, I16, I32, round_to_bfloat16

# Type of stored weights and keys -> a value of the numba type of its elements. uint16 means bits of bfloat16,
# int16 bits of float16.
ELEMENTS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}


@llvm_function(types.float32, takes=types.float32)
def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, float32, with one rounding. After a condition, LLVM would fuse in only one of the
    vectorised and the scalar version of a loop."""
    return b.fma(x, y, z)


@llvm_function(types.float32, takes=types.float32)
def _truncate(b: Any, x: Any) -> Any:
    return b.sitofp(b.fptosi(x, I32), FLOAT)


@llvm_function(types.float32, takes=types.float32)
def _power_of_two(b: Any, x: Any) -> Any:
    return b.bitcast(b.shl(b.add(b.fptosi(x, I32), I32(127)), I32(23)), FLOAT)


def build_stored(b: Any, x: Any, element: Any) -> Any:
    """Convert float32 `x` to a type of ELEMENTS."""
    if element == types.uint16:
        return b.trunc(b.lshr(round_to_bfloat16(b, x), I32(16)), I16)
    if element == types.int16:
        return b.bitcast(b.fptrunc(x, HALF), I16)
    return x


@intrinsic
def stored(typingctx: Any, x: Any, element: Any) -> Any:
    """Convert float32 `x` to a type of ELEMENTS."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return build_stored(b, args[0], element)

    return element(types.float32, element), generate


@intrinsic
def loaded(typingctx: Any, x: Any) -> Any:
    """Convert an element of a type of ELEMENTS to float32."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if x == types.uint16:
            return b.bitcast(b.shl(b.zext(args[0], I32), I32(16)), FLOAT)
        if x == types.int16:
            return b.fpext(b.bitcast(args[0], HALF), FLOAT)
        return args[0]

    return types.float32(x), generate


@ordered
def exp(x: Any) -> Any:
    """Return e^x for float32 with a relative error of 2e-7. x is clamped to [-86, 86]. NaN gives NaN."""
    x = np.float32(-86) if x < np.float32(-86) else x
    x = np.float32(86) if x > np.float32(86) else x
    n = _truncate(x * np.float32(1.44269504) + np.float32(127.5)) - np.float32(127)
    # ln 2 is split into two parts. The first has so few bits that its product with n is exact.
    r = multiply_add(n, np.float32(-0.693359375), x) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720) + r * np.float32(1 / 5040)
    p = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * p)
    p = np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * (np.float32(1 / 6) + r * p)))
    return p * _power_of_two(n)


@ordered
def tanh(x: Any) -> Any:
    """Return tanh x for float32, with an absolute error of 2e-7. NaN gives NaN."""
    shrunk = exp(np.float32(-2) * abs(x))
    size = (np.float32(1) - shrunk) / (np.float32(1) + shrunk)
    return -size if x < np.float32(0) else size


@ordered
def softplus(x: Any) -> Any:
    """Return log(1 + e^x) for float32 with a relative error of 4e-7, also for large negative x. NaN gives
    NaN."""
    e = exp(-abs(x))
    # log(1 + e) = 2 artanh(z), as a series
    z = e / (np.float32(2) + e)
    s = z * z
    p = np.float32(1 / 9) + s * (np.float32(1 / 11) + s * np.float32(1 / 13))
    p = np.float32(1) + s * (np.float32(1 / 3) + s * (np.float32(1 / 5) + s * (np.float32(1 / 7) + s * p)))
    return max(x, np.float32(0)) + np.float32(2) * z * p
