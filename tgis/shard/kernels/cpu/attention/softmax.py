"""Online softmax over one span of keys, vectorised by hand so that every row runs the same code."""

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS
from tgis.shard.kernels.cpu.attention.vectors import (
    INTEGERS,
    LANES,
    VECTOR,
    constant,
    load,
    load_everywhere,
    multiply_add,
    store,
    use_widest,
)
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I32, I64, at, everywhere, loop

# Coefficients of a polynomial for 2^f, |f| <= 1/2: relative error 1e-7, and exactly 1 for f = 0.
_POWERS = (
    *(1.0, 0.6931470036506653, 0.24022242426872253),
    *(0.05550733581185341, 0.009671512991189957, 0.001326472731307149),
)
_LOG2_E = 1.4426950216293335
# Adding this to a number of moderate size rounds it to an integer, which is then in the lowest bits of the
# sum.
_ROUNDING = 1.5 * 2**23
_LEAST = -86.0  # smaller exponents are clamped to this


def _add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y, **FUSED)


def _multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    return _add(b, b.fmul(x, y, **FUSED), z)


def _greater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _exp(b: Any, x: Any) -> Any:
    """Return e^x of a vector, x at most 0. NaN gives NaN."""
    clamped = b.select(b.fcmp_ordered("<", x, constant(_LEAST)), constant(_LEAST), x)
    shifted = _multiply_add(b, clamped, constant(_LOG2_E), constant(_ROUNDING))
    whole = b.fsub(shifted, constant(_ROUNDING), **FUSED)
    f = multiply_add(b, clamped, constant(_LOG2_E), b.fneg(whole))
    p = reduce(lambda p, c: _multiply_add(b, p, f, constant(c)), _POWERS[-2::-1], constant(_POWERS[-1]))
    exponent = b.shl(b.bitcast(shifted, INTEGERS), ir.Constant(INTEGERS, [23] * LANES))
    power = b.bitcast(b.add(b.bitcast(p, INTEGERS), exponent), VECTOR)
    return b.select(b.fcmp_unordered("uno", x, x), x, power)


def _find_visible(b: Any, first: Any, count: Any) -> list[Any]:
    """Return a mask for each group: the keys of the span among the `count` keys from `first` on."""
    first, count = (everywhere(b, b.trunc(x, I32), LANES) for x in (first, count))
    lanes = [ir.Constant(INTEGERS, list(range(v * LANES, (v + 1) * LANES))) for v in range(GROUPS)]
    return [b.icmp_unsigned("<", b.sub(lane, first), count) for lane in lanes]


def _shuffle(b: Any, x: Any, distance: int) -> Any:
    order = [(lane + distance) % LANES for lane in range(LANES)]
    return b.shuffle_vector(x, x, ir.Constant(INTEGERS, order))


@intrinsic
def weigh(typingctx: Any, scores: Any, best: Any, sums: Any, length: Any, first: Any, count: Any) -> Any:
    """Turn a row of SPAN scores into softmax weights in place; update its running maximum and sums.

    Only the `count` keys from `first` on are visible; all others get weight 0. `best` is the address of the
    running maximum. Weights are exponentials relative to the new maximum; earlier sums are rescaled when it
    grows. `sums` is the address of the row's sums: `length` of them, in whole vectors. The last vector
    accumulates the weights lane by lane. `scores` is an address too."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, best, sums, length, first, count = args
        use_widest(b)
        visible = _find_visible(b, first, count)
        row = [load(b, scores, I64(4 * LANES * v)) for v in range(GROUPS)]
        before = load_everywhere(b, best, I64(0))
        top = reduce(
            lambda x, y: _greater(b, x, y),
            [b.select(mask, x, before) for mask, x in zip(visible, row, strict=True)],
        )
        for distance in (8, 4, 2, 1):
            top = _greater(b, _shuffle(b, top, distance), top)
        with b.if_then(b.fcmp_unordered("!=", *(b.extract_element(x, I32(0)) for x in (top, before)))):
            _fade(b, sums, length, _exp(b, b.fsub(before, top, **FUSED)))
            b.store(b.extract_element(top, I32(0)), at(b, best, I64(0), FLOAT))
        mass = b.add(sums, b.mul(b.sub(length, I64(LANES)), I64(4)))
        total = load(b, mass, I64(0))
        for v, (mask, x) in enumerate(zip(visible, row, strict=True)):
            weights = b.select(mask, _exp(b, b.fsub(x, top, **FUSED)), constant(0.0))
            store(b, weights, scores, I64(4 * LANES * v))
            total = _add(b, total, weights)
        store(b, total, mass, I64(0))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i), generate


def _fade(b: Any, sums: Any, length: Any, factor: Any) -> None:
    def build(k: Any, values: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(4 * LANES))
        store(b, b.fmul(load(b, sums, offset), factor, **FUSED), sums, offset)
        return values

    loop(b, b.sdiv(length, I64(LANES)), [], build)


@intrinsic
def add_lanes(typingctx: Any, address: Any) -> Any:
    """Return the sum of the vector at an address, always added in the same order."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        total = load(b, args[0], I64(0))
        for distance in (8, 4, 2, 1):
            total = _add(b, total, _shuffle(b, total, distance))
        return b.extract_element(total, I32(0))

    return types.float32(types.int64), generate
