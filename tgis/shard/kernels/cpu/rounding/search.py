"""Compiled form of the search in `quant/schemes/search.py`, with the same bits. A group stays in registers
while all ranges are tried; what depends on one range is a lane of a vector."""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, HALF, I32
from tgis.shard.kernels.cpu.rounding import vectors
from tgis.shard.kernels.cpu.rounding.vectors import LANES
from tgis.shard.quant.schemes.int4 import LAYOUT
from tgis.shard.quant.schemes.rounding import TINY
from tgis.shard.quant.schemes.search import RANGES

GROUP = LAYOUT.group or 0
_BOUND = 2.0 ** (LAYOUT.bits - 1)
_STEPS = (1 << LAYOUT.bits) - 1
_COUNT = len(RANGES)
_FITS = ir.VectorType(FLOAT, _COUNT)  # a number for each range


class _WeightedGroup(NamedTuple):
    """Vectors of a group."""

    values: list[Any]
    importance: list[Any]
    weighted: list[Any]  # values times importance


class _Fits(NamedTuple):
    """Least-squares fits of a group for each range."""

    errors: Any
    scales: Any
    offsets: Any


@llvm_function()
def search_group(b: Any, x: Any, importance: Any, codes: Any, scale: Any, offset: Any, element: Any) -> None:
    """Write the codes, the scale and the offset of a group at address `x` to other addresses. `importance` is
    the address of float32 [GROUP]."""
    values = vectors.load_group(b, x, GROUP, element)
    weights = vectors.load_group(b, importance, GROUP, types.float32)
    group = _WeightedGroup(values, weights, [b.fmul(*pair) for pair in zip(values, weights, strict=True)])
    low, high = (vectors.fold(b, combine, values) for combine in (vectors.smaller, vectors.larger))
    count, total = (vectors.fold(b, vectors.add, each) for each in (weights, group.weighted))
    width = b.fsub(high, low)
    middle = b.fmul(b.fadd(low, high), FLOAT(0.5))
    fits = _fit_ranges(b, group, width, middle, count, b.fdiv(total, count))
    best = _choose(b, fits, middle)
    magnitude = vectors.larger(b, *(llvm.call(b, "llvm.fabs.f32", FLOAT, each) for each in (low, high)))
    is_zero = b.fcmp_ordered("<", magnitude, FLOAT(TINY))
    factor, shift = (_round_to_half(b, b.select(is_zero, FLOAT(0.0), each)) for each in best)
    vectors.store_codes(b, _round(b, values, factor, shift), codes)
    is_finite = b.and_(vectors.is_finite(b, width), vectors.is_finite(b, total))
    is_finite = b.and_(is_finite, vectors.is_finite(b, shift))
    factor = b.select(is_finite, factor, FLOAT(float("nan")))
    for number, address in ((factor, scale), (shift, offset)):
        b.store(number, llvm.pointer_to(b, FLOAT, address), align=4)


def _fit_ranges(b: Any, group: _WeightedGroup, width: Any, middle: Any, count: Any, mean: Any) -> _Fits:
    """Emit the fit for each range. No operation is fused, because torch does not fuse them either. `count` is
    the sum of importance."""
    widths = ir.Constant(_FITS, [each / _STEPS for each in RANGES])
    steps = b.fmul(llvm.broadcast(b, width, _COUNT), widths)
    shifts = b.fadd(llvm.broadcast(b, middle, _COUNT), b.fmul(steps, llvm.constant(0.5, _COUNT)))
    few = []
    for i in range(_COUNT):
        step, shift = (b.extract_element(each, I32(i)) for each in (steps, shifts))
        few.append(_sum_products(b, group, _round(b, group.values, step, shift)))
    sums, square_sums, product_sums = (
        vectors.fold_four(b, vectors.add, each) for each in zip(*few, strict=True)
    )
    counts, means = (llvm.broadcast(b, each, _COUNT) for each in (count, mean))
    centres = b.fdiv(sums, counts)
    spread = b.fsub(square_sums, b.fmul(b.fmul(counts, centres), centres))
    shared = b.fsub(product_sums, b.fmul(b.fmul(counts, means), centres))
    zero = llvm.constant(0.0, _COUNT)
    scales = b.select(b.fcmp_ordered(">", spread, zero), b.fdiv(shared, spread), zero)
    return _Fits(b.fmul(b.fneg(shared), scales), scales, b.fsub(means, b.fmul(scales, centres)))


def _sum_products(b: Any, group: _WeightedGroup, codes: list[Any]) -> list[Any]:
    """Emit the beginnings of sums times importance: of codes, of their squares, and of their products with
    values."""
    weighted = [b.fmul(*pair) for pair in zip(codes, group.importance, strict=True)]
    squares = [b.fmul(*pair) for pair in zip(weighted, codes, strict=True)]
    products = [b.fmul(*pair) for pair in zip(group.weighted, codes, strict=True)]
    return [vectors.fold_to_few(b, vectors.add, each) for each in (weighted, squares, products)]


def _choose(b: Any, fits: _Fits, middle: Any) -> tuple[Any, Any]:
    """Emit the scale and the offset of the first range with the least error."""
    least = FLOAT(float("inf"))
    scale = FLOAT(0.0)
    offset = middle
    for i in range(_COUNT):
        error, *fit = (b.extract_element(each, I32(i)) for each in fits)
        is_better = b.fcmp_ordered("<", error, least)
        least = b.select(is_better, error, least)
        scale, offset = (b.select(is_better, *pair) for pair in zip(fit, (scale, offset), strict=True))
    return scale, offset


def _round(b: Any, values: list[Any], scale: Any, offset: Any) -> list[Any]:
    """Emit the codes nearest to values, as float32. They are 0 if the scale is 0."""
    inverse = b.select(b.fcmp_ordered(">", scale, FLOAT(0.0)), b.fdiv(FLOAT(1.0), scale), FLOAT(0.0))
    factors, shifts = (llvm.broadcast(b, each, LANES) for each in (inverse, offset))
    scaled = [b.fmul(b.fsub(value, shifts), factors) for value in values]
    return [vectors.round_clamped(b, each, FLOAT(-_BOUND), FLOAT(_BOUND - 1)) for each in scaled]


def _round_to_half(b: Any, x: Any) -> Any:
    return b.fpext(b.fptrunc(x, HALF), FLOAT)
