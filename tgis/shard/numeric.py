"""Scalar arithmetic for compiled kernels, in LLVM IR where numba would widen integers to 64 bits and so keep a loop from
being vectorised."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tgis.shard.compiled import inner

_HALF, _FLOAT, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)


def _unary(result: Any, argument: Any, build: Callable[[Any, Any], Any]) -> Any:
    """A function result(argument) for kernels, whose code is build(builder, value)."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return build(b, args[0])

    def unary(typingctx: Any, x: Any) -> Any:
        return result(argument), generate

    return intrinsic(unary)


def _round_to_bfloat16(b: Any, x: Any) -> Any:
    bits = b.bitcast(x, _I32)
    even = b.and_(b.lshr(bits, _I32(16)), _I32(1))
    rounded = b.trunc(b.lshr(b.add(b.add(bits, _I32(0x7FFF)), even), _I32(16)), _I16)
    is_nan = b.icmp_unsigned(">", b.and_(bits, _I32(0x7FFFFFFF)), _I32(0x7F800000))
    return b.select(is_nan, _I16(0x7FC0), rounded)


def _power_of_two(b: Any, x: Any) -> Any:
    return b.bitcast(b.shl(b.add(b.fptosi(x, _I32), _I32(127)), _I32(23)), _FLOAT)


_truncated = _unary(types.float32, types.float32, lambda b, x: b.sitofp(b.fptosi(x, _I32), _FLOAT))
_two_to_the = _unary(types.float32, types.float32, _power_of_two)


@intrinsic
def stored(typingctx: Any, x: Any, element: Any) -> Any:
    """In a kernel: float32 `x` as the cache keeps it; an uint16 `element` asks for bfloat16 bits, int16 for float16."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if element == types.uint16:
            return _round_to_bfloat16(b, args[0])
        if element == types.int16:
            return b.bitcast(b.fptrunc(args[0], _HALF), _I16)
        return args[0]

    return element(types.float32, element), generate


@inner
def exp(x: Any) -> Any:
    """e^x for float32, to a relative 3e-7 where |x| <= 86 and held there beyond; NaN for NaN."""
    x = np.float32(-86) if x < np.float32(-86) else x
    x = np.float32(86) if x > np.float32(86) else x
    t = x * np.float32(1.44269504)
    n = _truncated(t + np.float32(127.5)) - np.float32(127)
    r = (t - n) * np.float32(0.69314718)
    p = np.float32(1 / 720) + r * np.float32(1 / 5040)
    p = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * p)
    p = np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * (np.float32(1 / 6) + r * p)))
    return p * _two_to_the(n)


@inner
def tanh(x: Any) -> Any:
    """tanh for float32, to an absolute 3e-7; NaN for NaN."""
    shrunk = exp(np.float32(-2) * abs(x))
    size = (np.float32(1) - shrunk) / (np.float32(1) + shrunk)
    return -size if x < np.float32(0) else size
