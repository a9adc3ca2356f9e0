"""Builders of LLVM code for the operands of attention's products. Elements of the cache are single numbers,
which are multiplied in float32, or pairs of bfloat16, which are multiplied by pairs of queries or softmax
weights.

Queries and softmax weights have one of three types: float32; uint16, which means float32 rounded to bfloat16;
or PAIR."""

from typing import Any

from numba import types

from tgis.shard.kernels.cpu.attention.elements.conversion import load_cached
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.pairs import PAIR
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I32, I64
from tgis.shard.kernels.cpu.jit.vectors import INTEGERS, LANES, VECTOR, ZERO, store

TILE_PAIR = types.uint64
"""Numba type that stands for pairs that AMX multiplies."""

UPPER = 0xFFFF0000  # bits of the first number of a pair


def count_columns(element: Any) -> int:
    """Return the count of numbers in an element."""
    return pairs.COLUMNS if element == PAIR else 1


def load_elements(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Load LANES elements of the cache as operands of `add_products`."""
    if element == PAIR:
        return pairs.load(b, b.add(base, offset), LANES, align=4)
    return load_cached(b, base, offset, element)


def drop_later(b: Any, loaded: Any) -> Any:
    """Return pairs whose second numbers are replaced by 0."""
    kept = b.and_(b.bitcast(loaded, INTEGERS), llvm.constant(UPPER, LANES, I32))
    return b.bitcast(kept, loaded.type)


def store_weights(b: Any, weights: list[Any], address: Any, element: Any) -> Any:
    """Store vectors of softmax weights in the type for products with values. Return their sum by lane.

    The sum is that of the rounded weights, in the order of pairs, so that rounding errors cancel in the
    softmax."""
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
            [total] = pairs.add_products(b, [total], [pairs.ones(b, LANES)], [both], element)
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
    """Convert `count` float32 numbers at an address, in place, to the type for products with keys. The rest
    of the last vector is overwritten with arbitrary values."""
    if element == PAIR:
        pairs.copy_rounded(b, address, address, count)
    elif element == types.uint16:

        def build(k: Any, _: list[Any]) -> list[Any]:
            place = b.add(address, b.mul(k, I64(4)))
            llvm.store_vector(b, round_vector(b, llvm.load_vector(b, place, LANES)), place)
            return []

        llvm.loop_range(b, I64(0), count, LANES, [], build)


def round_vector(b: Any, x: Any) -> Any:
    """Round a vector of float32 to values of bfloat16."""
    return b.bitcast(llvm.round_to_bfloat16(b, x), VECTOR)
