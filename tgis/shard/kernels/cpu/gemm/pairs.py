"""Pairs of bfloat16, the elements of panels and of x in products with bfloat16 arithmetic.

The processor's instruction adds two products to a float32 sum, that of the upper halves first, and rounds
after each, like two fused multiply-adds. The first column is in the upper half, so a sum is the same chain as
in a float32 product of values rounded to bfloat16, except that values below 2**-126 are flushed to zero."""

from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import BFLOAT, I32, I64

PAIR = types.uint32
COLUMNS, NUM_BYTES = 2, 4  # columns and bytes of a pair
_LANES = 16  # pairs in a vector
_BITS = 16  # bits of a half
_ONES = 0x3F803F80  # bits of the pair (1, 1)


def is_supported() -> bool:
    """Return True if the processor multiplies pairs."""
    return llvm.has_feature("avx512bf16")


def are_fast() -> bool:
    """Return True if products of pairs are faster than rounding and float32 arithmetic: from AMD's Zen 4 on.
    Intel's processors run the instruction at half the rate of float32's multiply-adds."""
    return is_supported() and llvm.processor_name().startswith("znver")


def vector_type(lanes: int) -> Any:
    return ir.VectorType(BFLOAT, COLUMNS * lanes)


def load(b: Any, address: Any, lanes: int, align: int = 64) -> Any:
    return b.load(llvm.pointer_to(b, vector_type(lanes), address), align=align)


def load_factor(b: Any, address: Any, lanes: int, element: Any) -> Any:
    """Load the factor of vectors of `element`'s type, one pair or one float32, and broadcast it."""
    if element != PAIR:
        return llvm.load_broadcast(b, address, lanes)
    pair = b.load(llvm.pointer_to(b, I32, address), align=4)
    return b.bitcast(llvm.broadcast(b, pair, lanes), vector_type(lanes))


def ones(b: Any, lanes: int) -> Any:
    """Return a vector of pairs (1, 1)."""
    return b.bitcast(llvm.constant(_ONES, lanes, I32), vector_type(lanes))


def add_products(b: Any, sums: list[Any], factors: list[Any], vectors: list[Any], element: Any) -> list[Any]:
    """Do the same as `llvm.add_products`, also for pairs. `element` is the type of the vectors."""
    if element != PAIR:
        return llvm.add_products(b, sums, factors, vectors)
    # Weights are the first operand. As the second one, they would be read from memory by the instruction,
    # which is slower.
    cells = [(x, factor) for factor in factors for x in vectors]
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * _LANES}"
    return [llvm.call(b, name, total.type, total, *cell) for total, cell in zip(sums, cells, strict=True)]


def copy_rounded(b: Any, to: Any, source: Any, count: Any) -> None:
    """Emit the copy of `count` float32 numbers as pairs, rounded half to even. Writes whole vectors, padded
    with 0."""
    width = COLUMNS * _LANES
    whole = b.and_(count, I64(-width))

    def copy_vector(k: Any, _: list[Any]) -> list[Any]:
        places = [b.add(source, b.mul(b.add(k, I64(half * _LANES)), I64(4))) for half in range(COLUMNS)]
        _store_rounded(b, to, k, [llvm.load_vector(b, place, _LANES) for place in places])
        return []

    def copy_rest(k: Any, _: list[Any]) -> list[Any]:
        halves = []
        for half in range(COLUMNS):
            begin = b.add(k, I64(half * _LANES))
            mask = llvm.first_lanes(b, b.trunc(b.sub(count, begin), I32), _LANES)
            halves.append(llvm.load_vector(b, b.add(source, b.mul(begin, I64(4))), _LANES, mask))
        _store_rounded(b, to, k, halves)
        return []

    llvm.loop_range(b, I64(0), whole, width, [], copy_vector)
    llvm.loop_range(b, whole, count, width, [], copy_rest)


def _store_rounded(b: Any, to: Any, k: Any, halves: list[Any]) -> None:
    """Emit the store of two vectors of float32, columns k and following, as pairs."""
    llvm.store_vector(b, round_two(b, halves), b.add(to, b.mul(k, I64(NUM_BYTES // COLUMNS))))


def round_two(b: Any, halves: list[Any]) -> Any:
    """Round two vectors of float32, half to even, to one vector of pairs (int32)."""
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * _LANES}"
    rounded = b.bitcast(llvm.call(b, name, vector_type(_LANES), halves[1], halves[0]), _INTEGERS)
    bits = llvm.constant(_BITS, _LANES, I32)
    return b.or_(b.shl(rounded, bits), b.lshr(rounded, bits))


_INTEGERS = ir.VectorType(I32, _LANES)
