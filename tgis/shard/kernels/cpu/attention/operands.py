"""Builders of LLVM code for the operands of attention's products. Elements of the cache are numbers, which
are multiplied with float32, or pairs of bfloat16, which are multiplied with pairs of queries or weights.

What is multiplied with the elements, queries and softmax weights, has a type of its own: float32; uint16,
which are float32 rounded to bfloat16; or PAIR."""

from typing import Any

from numba import types

from tgis.shard.kernels.cpu.attention.vectors import (
    INTEGERS,
    LANES,
    VECTOR,
    ZERO,
    load_cached,
    store,
)
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.pairs import PAIR
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I32, I64

_BITS, _UPPER = 16, 0xFFFF0000  # bits of bfloat16, and those of float32 that it keeps
_NAN = 0x7FC00000


def count_columns(element: Any) -> int:
    """Return how many numbers an element holds."""
    return pairs.COLUMNS if element == PAIR else 1


def load_elements(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Load LANES elements of the cache, ready for `add_products`."""
    if element == PAIR:
        return pairs.load(b, b.add(base, offset), LANES, align=4)
    return load_cached(b, base, offset, element)


def drop_later(b: Any, loaded: Any) -> Any:
    """Return pairs with 0 as their later numbers."""
    kept = b.and_(b.bitcast(loaded, INTEGERS), llvm.constant(_UPPER, LANES, I32))
    return b.bitcast(kept, loaded.type)


def load_factor(b: Any, address: Any, element: Any) -> Any:
    """Load one number or pair that elements are multiplied with, into all lanes."""
    load = pairs.load_broadcast if element == PAIR else llvm.load_broadcast
    return load(b, address, LANES)


def add_products(b: Any, sums: list[Any], factors: list[Any], loaded: list[Any], element: Any) -> list[Any]:
    """Return sums with sums[r * len(loaded) + v] += factors[r] * loaded[v]."""
    add = pairs.add_products if element == PAIR else llvm.add_products
    return add(b, sums, factors, loaded)


def store_weights(b: Any, weights: list[Any], address: Any, element: Any) -> Any:
    """Store vectors of softmax weights as the type that values are multiplied with, and return their sums,
    lane by lane.

    Rounded weights are added as such, in the order of pairs, so that errors of all weights cancel."""
    total = ZERO
    if element == types.float32:
        for v, weight in enumerate(weights):
            store(b, weight, address, I64(4 * LANES * v))
            total = b.fadd(total, weight, **FUSED)
        return total
    for v in range(0, len(weights), pairs.COLUMNS):
        two = weights[v : v + pairs.COLUMNS]
        if element == PAIR:
            rounded = pairs.round_two(b, two)
            store(b, rounded, address, I64(4 * LANES * v // pairs.COLUMNS))
            both = b.bitcast(rounded, pairs.vector_type(LANES))
            [total] = pairs.add_products(b, [total], [pairs.ones(b, LANES)], [both])
        else:
            two = [round_vector(b, weight) for weight in two]
            for i, weight in enumerate(two):
                store(b, weight, address, I64(4 * LANES * (v + i)))
            for half in range(pairs.COLUMNS):
                every_other = range(half, pairs.COLUMNS * LANES, pairs.COLUMNS)
                total = b.fadd(total, llvm.shuffle(b, two[0], two[1], list(every_other)), **FUSED)
    return total


@llvm_function()
def round_query(b: Any, address: Any, count: Any, element: Any) -> None:
    """Convert `count` float32 numbers at an address to the type that keys are multiplied with, in place. They
    may be followed by others up to a whole vector, which are arbitrary afterwards."""
    if element == PAIR:
        pairs.copy_rounded(b, address, address, count)
    elif element == types.uint16:

        def build(k: Any, _: list[Any]) -> list[Any]:
            place = b.add(address, b.mul(k, I64(4)))
            llvm.store_vector(b, round_vector(b, llvm.load_vector(b, place, LANES)), place)
            return []

        llvm.loop_range(b, I64(0), count, LANES, [], build)


def round_vector(b: Any, x: Any) -> Any:
    """Round a vector of float32 to bfloat16, half to even, kept as float32."""
    bits = b.bitcast(x, INTEGERS)
    even = b.and_(b.lshr(bits, llvm.constant(_BITS, LANES, I32)), llvm.constant(1, LANES, I32))
    rounded = b.add(b.add(bits, llvm.constant(0x7FFF, LANES, I32)), even)
    kept = b.and_(rounded, llvm.constant(_UPPER, LANES, I32))
    nan = llvm.constant(_NAN, LANES, I32)  # rounding would make some NaNs infinite
    return b.bitcast(b.select(b.fcmp_unordered("uno", x, x), nan, kept), VECTOR)
