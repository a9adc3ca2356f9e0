"""Compiled form of `round_to_integers` in `quant/schemes/rounding.py`, with the same bits. A group is read
twice, the second time from the cache."""

from typing import Any

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I32, I64
from tgis.shard.kernels.cpu.rounding import vectors
from tgis.shard.kernels.cpu.rounding.vectors import LANES
from tgis.shard.quant.schemes.rounding import TINY

_MAGNITUDE = 0x7FFFFFFF  # bits of a float32 number other than its sign


@llvm_function()
def round_group(
    b: Any, x: Any, num_vectors: Any, bound: Any, num_steps: Any, codes: Any, scale: Any, element: Any
) -> None:
    """Write the codes and the scale of a group of vectors of LANES weights at address `x` to other addresses.
    Codes are from -bound to bound - 1; the largest magnitude is `num_steps` of them."""
    largest = _find_largest(b, x, num_vectors, element)
    # Infinity and NaN are neither small nor finite.
    is_small = b.fcmp_ordered("<", largest, FLOAT(TINY))
    is_finite = vectors.is_finite(b, largest)
    largest = b.select(is_small, FLOAT(0.0), largest)
    steps, limit = b.sitofp(num_steps, FLOAT), b.sitofp(bound, FLOAT)
    factor = b.select(b.fcmp_ordered(">", largest, FLOAT(0.0)), b.fdiv(steps, largest), FLOAT(0.0))
    factors = llvm.broadcast(b, factor, LANES)
    limits = b.fneg(limit), b.fsub(limit, FLOAT(1.0))

    def store(i: Any, none: list[Any]) -> list[Any]:
        product = b.fmul(_load(b, x, i, element), factors)
        rounded = vectors.round_clamped(b, product, *limits)
        vectors.store_codes(b, [rounded], b.add(codes, b.mul(i, I64(LANES))))
        return none

    llvm.loop(b, num_vectors, [], store)
    number = b.select(is_finite, b.fdiv(largest, steps), FLOAT(float("nan")))
    b.store(number, llvm.pointer_to(b, FLOAT, scale), align=4)


def _find_largest(b: Any, x: Any, num_vectors: Any, element: Any) -> Any:
    """Emit the largest magnitude. It is infinite or NaN if a weight is."""
    mask = llvm.constant(_MAGNITUDE, LANES, I32)

    def update(i: Any, largest: list[Any]) -> list[Any]:
        bits = b.bitcast(_load(b, x, i, element), mask.type)
        return [_larger(b, largest[0], b.and_(bits, mask))]

    lanes = llvm.loop(b, num_vectors, [llvm.constant(0, LANES, I32)], update)
    return b.bitcast(vectors.fold(b, _larger, lanes), FLOAT)


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _load(b: Any, x: Any, i: Any, element: Any) -> Any:
    width = element.bitwidth // 8
    return llvm.load_stored(b, b.add(x, b.mul(i, I64(LANES * width))), LANES, element, width)
