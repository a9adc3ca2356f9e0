"""Builder of the LLVM code that rounds a group of activations to 8 bits by the rule of
`quant/schemes/int8.py`. The group stays in registers between the search for its largest magnitude and the
rounding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from tgis.shard.kernels.cpu.int8.inner_loop import HEADER
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I32, I64
from tgis.shard.quant.schemes.int8 import GROUP

LARGEST, OFFSET = 127, 128
_LANES = 16
_VECTORS = GROUP // _LANES  # vectors per group
_TINY = 1e-30  # groups whose largest magnitude is smaller become zeros
_MAGNITUDE = 0x7FFFFFFF
_INTEGERS = ir.VectorType(I32, _LANES)
Masks = Sequence[Sequence[Any]]
"""For each vector of a group, the masks for loading and for storing. None: all lanes."""


def make_quantizer(width: int) -> Any:
    """Build a kernel function that writes a group of n (1 to GROUP) activations: its scale, the correction of
    its sums, and its values of `width` bytes, zero-padded to `padded` values."""

    @llvm_function()
    def quantize_group(b: Any, x: Any, n: Any, padded: Any, out: Any) -> None:
        choose_masks(b, n, padded, partial(_quantize, b, x, out, width))

    return quantize_group


def choose_masks(b: Any, n: Any, padded: Any, build: Callable[[Masks], None]) -> None:
    """Emit code for groups of n activations that are zero-padded to `padded` values."""
    ragged, end = b.append_basic_block("ragged"), b.append_basic_block("end")
    cases = b.switch(n, ragged)
    for count in range(1, _VECTORS + 1):
        block = b.append_basic_block(f"vectors{count}")
        cases.add_case(I64(_LANES * count), block)
        b.position_at_end(block)
        build([(None, None)] * count)
        b.branch(end)
    b.position_at_end(ragged)
    begins = [I64(_LANES * i) for i in range(_VECTORS)]
    build([[llvm.first_lanes(b, b.sub(m, begin), _LANES) for m in (n, padded)] for begin in begins])
    b.branch(end)
    b.position_at_end(end)


def _quantize(b: Any, x: Any, out: Any, width: int, masks: Masks) -> None:
    group = round_group(b, x, masks)
    store_group(b, group, b.add(out, I64(HEADER)), masks, width)
    b.store(group.scale, llvm.pointer_to(b, FLOAT, out), align=4)
    b.store(group.correction, llvm.pointer_to(b, I32, out, I64(4)), align=4)


class RoundedGroup(NamedTuple):
    vectors: list[Any]  # int32
    scale: Any  # float32
    correction: Any  # int32, the sum times -OFFSET


def round_group(b: Any, x: Any, masks: Masks) -> RoundedGroup:
    """Emit the rounding of a group."""
    values = [
        llvm.load_vector(b, b.add(x, I64(4 * _LANES * i)), _LANES, inside)
        for i, (inside, _) in enumerate(masks)
    ]
    largest = _find_largest(b, values)
    # Infinity and NaN are neither small nor finite.
    is_small, is_finite = (b.fcmp_ordered("<", largest, FLOAT(bound)) for bound in (_TINY, math.inf))
    is_zero = b.or_(is_small, b.not_(is_finite))
    factor = b.select(is_zero, FLOAT(0.0), b.fdiv(FLOAT(float(LARGEST)), largest))
    factors = llvm.broadcast(b, factor, _LANES)
    rounded = [_round(b, b.fmul(value, factors)) for value in values]
    scale = b.select(is_small, FLOAT(0.0), b.fdiv(largest, FLOAT(float(LARGEST))))
    scale = b.select(is_finite, scale, FLOAT(math.nan))
    return RoundedGroup(rounded, scale, b.mul(_reduce(b, "add", rounded), I32(-OFFSET)))


def store_group(b: Any, group: RoundedGroup, to: Any, masks: Masks, width: int) -> None:
    """Emit the store of a group's values, `width` bytes each."""
    for i, (vector, (_, stored)) in enumerate(zip(group.vectors, masks, strict=True)):
        _store(b, vector, b.add(to, I64(i * _LANES * width)), stored, 8 * width)


def _round(b: Any, x: Any) -> Any:
    return b.fptosi(llvm.call(b, f"llvm.rint.v{_LANES}f32", x.type, x), _INTEGERS)


def _find_largest(b: Any, values: list[Any]) -> Any:
    """Emit the largest magnitude. It is infinite or NaN if a value is."""
    mask = llvm.constant(_MAGNITUDE, _LANES, I32)
    magnitudes = [b.and_(b.bitcast(value, _INTEGERS), mask) for value in values]
    return b.bitcast(_reduce(b, "smax", magnitudes), FLOAT)


def _reduce(b: Any, operation: str, vectors: list[Any]) -> Any:
    """Emit the sum ("add") or the maximum ("smax") of all lanes."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        rest = vectors[len(vectors) // 2 * 2 :]
        vectors = [_combine(b, operation, *pair) for pair in pairs] + rest
    return llvm.call(b, f"llvm.vector.reduce.{operation}.v{_LANES}i32", I32, vectors[0])


def _combine(b: Any, operation: str, first: Any, second: Any) -> Any:
    if operation == "add":
        return b.add(first, second)
    return llvm.call(b, f"llvm.{operation}.v{_LANES}i32", _INTEGERS, first, second)


def _store(b: Any, rounded: Any, address: Any, mask: Any, bits: int) -> None:
    """Emit the store of integers, only those in the mask if there is one."""
    values = b.trunc(rounded, ir.VectorType(ir.IntType(bits), _LANES))
    place = llvm.pointer_to(b, values.type, address)
    if mask is None:
        b.store(values, place, align=1)
    else:
        name = f"llvm.masked.store.v{_LANES}i{bits}.p0"
        llvm.call(b, name, ir.VoidType(), values, place, I32(1), mask)
