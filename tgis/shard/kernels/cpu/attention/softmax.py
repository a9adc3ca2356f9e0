"""Online softmax over one span of keys, vectorised by hand so that every row runs the same code."""

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.attention.operands import store_weights
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS
from tgis.shard.kernels.cpu.attention.vectors import (
    INTEGERS,
    LANES,
    VECTOR,
    ZERO,
    load,
    prefer_512_bits,
    store,
)
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I32, I64

# Coefficients of a polynomial for 2^f, |f| <= 1/2, the highest power first. Its relative error is 1e-7, and
# it is exactly 1 for f = 0.
_POWERS = [
    llvm.constant(coefficient, LANES)
    for coefficient in (
        *(0.001326472731307149, 0.009671512991189957, 0.05550733581185341),
        *(0.24022242426872253, 0.6931470036506653, 1.0),
    )
]
_LOG2_E = llvm.constant(1.4426950216293335, LANES)
# Adding this to a moderate number rounds it to an integer, which is then in the lowest bits of the sum.
_ROUNDING = llvm.constant(1.5 * 2**23, LANES)
_MIN_EXPONENT = llvm.constant(-86.0, LANES)  # smaller exponents are clamped to this


def _add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y, **FUSED)


def _multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    return _add(b, b.fmul(x, y, **FUSED), z)


def _maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _exp(b: Any, x: Any) -> Any:
    """Return e^x of a vector, x at most 0. NaN gives NaN."""
    clamped = b.select(b.fcmp_ordered("<", x, _MIN_EXPONENT), _MIN_EXPONENT, x)
    shifted = _multiply_add(b, clamped, _LOG2_E, _ROUNDING)
    whole = b.fsub(shifted, _ROUNDING, **FUSED)
    f = llvm.call(b, f"llvm.fma.v{LANES}f32", VECTOR, clamped, _LOG2_E, b.fneg(whole))  # rounded once
    p = reduce(lambda p, c: _multiply_add(b, p, f, c), _POWERS)
    exponent = b.shl(b.bitcast(shifted, INTEGERS), llvm.constant(23, LANES, I32))
    power = b.bitcast(b.add(b.bitcast(p, INTEGERS), exponent), VECTOR)
    return b.select(b.fcmp_unordered("uno", x, x), x, power)


def _find_visible(b: Any, first: Any, count: Any) -> list[Any]:
    """Return a mask for each group: the keys of the span among the `count` keys from `first` on."""
    first, count = (llvm.broadcast(b, b.trunc(x, I32), LANES) for x in (first, count))
    lanes = [ir.Constant(INTEGERS, list(range(v * LANES, (v + 1) * LANES))) for v in range(GROUPS)]
    return [b.icmp_unsigned("<", b.sub(lane, first), count) for lane in lanes]


def _rotate_lanes(b: Any, x: Any, distance: int) -> Any:
    return llvm.shuffle(b, x, x, [(lane + distance) % LANES for lane in range(LANES)])


@llvm_function()
def update_softmax(
    b: Any, scores: Any, maximum: Any, sums: Any, length: Any, first: Any, count: Any, element: Any
) -> None:
    """Turn a row of SPAN scores into softmax weights in place; update its running maximum and sums.

    Only the `count` keys from `first` on are visible; all others get weight 0. Weights are exponentials
    relative to the new maximum; earlier sums are rescaled when it grows. `scores`, `maximum` and `sums` are
    addresses. There are `length` sums, in whole vectors; the last accumulates the weights lane by lane.
    `element` is a value of the weights' type, see `operands`."""
    prefer_512_bits(b)
    visible = _find_visible(b, first, count)
    row = [load(b, scores, I64(4 * LANES * v)) for v in range(GROUPS)]
    before = llvm.load_broadcast(b, maximum, LANES)
    after = reduce(
        lambda x, y: _maximum(b, x, y),
        [b.select(mask, x, before) for mask, x in zip(visible, row, strict=True)],
    )
    for distance in (8, 4, 2, 1):
        after = _maximum(b, _rotate_lanes(b, after, distance), after)
    with b.if_then(b.fcmp_unordered("!=", *(b.extract_element(x, I32(0)) for x in (after, before)))):
        _rescale(b, sums, length, _exp(b, b.fsub(before, after, **FUSED)))
        b.store(b.extract_element(after, I32(0)), llvm.pointer_to(b, FLOAT, maximum))
    weight_sums = b.add(sums, b.mul(b.sub(length, I64(LANES)), I64(4)))
    weights = [
        b.select(mask, _exp(b, b.fsub(x, after, **FUSED)), ZERO) for mask, x in zip(visible, row, strict=True)
    ]
    total = store_weights(b, weights, scores, load(b, weight_sums, I64(0)), element)
    store(b, total, weight_sums, I64(0))


def _rescale(b: Any, sums: Any, length: Any, factor: Any) -> None:
    def build(k: Any, values: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(4 * LANES))
        store(b, b.fmul(load(b, sums, offset), factor, **FUSED), sums, offset)
        return values

    llvm.loop(b, b.sdiv(length, I64(LANES)), [], build)


@llvm_function()
def merge_results(b: Any, result: Any, sums: Any, maximum: Any, length: Any) -> None:
    """Add `length` sums that are relative to a maximum to those of `result`, which its own maximum follows.
    The arguments are addresses but for `length`, a multiple of LANES."""
    prefer_512_bits(b)
    own_maximum = b.add(result, b.mul(length, I64(4)))
    own, other = (llvm.load_broadcast(b, x, LANES) for x in (own_maximum, maximum))
    after = _maximum(b, own, other)
    own_factor, factor = (_exp(b, b.fsub(x, after, **FUSED)) for x in (own, other))

    def build(k: Any, values: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(4 * LANES))
        kept = b.fmul(load(b, result, offset), own_factor)
        total = llvm.call(b, f"llvm.fma.v{LANES}f32", VECTOR, load(b, sums, offset), factor, kept)
        store(b, total, result, offset)
        return values

    llvm.loop(b, b.sdiv(length, I64(LANES)), [], build)
    b.store(b.extract_element(after, I32(0)), llvm.pointer_to(b, FLOAT, own_maximum))


@llvm_function(types.float32)
def sum_lanes(b: Any, address: Any) -> Any:
    """Return the sum of the vector at an address, always added in the same order."""
    total = load(b, address, I64(0))
    for distance in (8, 4, 2, 1):
        total = _add(b, total, _rotate_lanes(b, total, distance))
    return b.extract_element(total, I32(0))
