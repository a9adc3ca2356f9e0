"""Builders of the LLVM code that loads a group of weights, combines its values, and stores its codes.

A group is a power of two of values, in registers. Sums are folded: the upper half of the values is added to
the lower half until one value is left. This order is that of the portable versions, so the bits are equal."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I8, I32, I64

LANES = 16
_BYTES = ir.VectorType(I8, LANES)
_FEW = 4


def load_group(b: Any, address: Any, size: int, element: Any) -> list[Any]:
    """Emit the loads of a group of `size` values as vectors of float32. `element` is a numba type of
    `llvm.STORED`."""
    width = element.bitwidth // 8
    places = [b.add(address, I64(first * width)) for first in range(0, size, LANES)]
    return [llvm.load_stored(b, place, LANES, element, width) for place in places]


def round_clamped(b: Any, values: Any, low: Any, high: Any) -> Any:
    """Emit the nearest integers, half to even, within float32 bounds. NaN becomes `low`."""
    rounded = llvm.call(b, f"llvm.rint.v{LANES}f32", values.type, values)
    return smaller(b, larger(b, rounded, llvm.broadcast(b, low, LANES)), llvm.broadcast(b, high, LANES))


def store_codes(b: Any, vectors: Sequence[Any], address: Any) -> None:
    """Emit the store of float32 integers as bytes."""
    for i, vector in enumerate(vectors):
        words = b.fptosi(vector, ir.VectorType(I32, LANES))
        place = b.add(address, I64(LANES * i))
        b.store(b.trunc(words, ir.VectorType(I8, LANES)), llvm.pointer_to(b, _BYTES, place), align=1)


Combine = Callable[[Any, Any, Any], Any]
"""Emits an operation on two vectors."""


def add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


def smaller(b: Any, x: Any, y: Any) -> Any:
    """Emit the minimum. If x or y is NaN, it is y."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def larger(b: Any, x: Any, y: Any) -> Any:
    """Emit the maximum. If x or y is NaN, it is y."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def fold(b: Any, combine: Combine, vectors: Sequence[Any]) -> Any:
    """Emit the combination of all values of vectors, a power of two of them."""
    vector = _fold_lanes(b, combine, _fold_vectors(b, combine, vectors), 1)
    return b.extract_element(vector, I32(0))


def fold_to_few(b: Any, combine: Combine, vectors: Sequence[Any]) -> Any:
    """Emit the first part of `fold`, until four values are left."""
    return _fold_lanes(b, combine, _fold_vectors(b, combine, vectors), _FEW)


def fold_four(b: Any, combine: Combine, few: Sequence[Any]) -> Any:
    """Emit the rest of `fold` for four results of `fold_to_few`, as a vector of four values."""
    return _fold_vectors(b, combine, _transpose(b, few))


def _fold_vectors(b: Any, combine: Combine, vectors: Sequence[Any]) -> Any:
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [combine(b, *pair) for pair in zip(vectors[:half], vectors[half:], strict=True)]
    return vectors[0]


def _fold_lanes(b: Any, combine: Combine, vector: Any, lanes: int) -> Any:
    while vector.type.count > lanes:
        count = vector.type.count
        halves = ([*range(count // 2)], [*range(count // 2, count)])
        vector = combine(b, *(llvm.shuffle(b, vector, vector, half) for half in halves))
    return vector


def _transpose(b: Any, rows: Sequence[Any]) -> list[Any]:
    """Emit the columns of four vectors of four values."""
    pairs = [[llvm.shuffle(b, rows[i], rows[i + 1], lanes) for lanes in _INTERLEAVED] for i in (0, 2)]
    return [llvm.shuffle(b, pairs[0][i], pairs[1][i], lanes) for i in (0, 1) for lanes in _JOINED]


_INTERLEAVED = ([0, 4, 1, 5], [2, 6, 3, 7])
_JOINED = ([0, 1, 4, 5], [2, 3, 6, 7])


def is_finite(b: Any, x: Any) -> Any:
    """Emit the test of a float32 number."""
    return b.fcmp_ordered("<", llvm.call(b, "llvm.fabs.f32", FLOAT, x), FLOAT(float("inf")))
