"""Copies of a span's keys and values as float32. Conversion is expensive, so a unit with many rows converts
each span once instead of in every tile."""

from typing import Any

from numba import types

from tgis.shard.kernels.cpu.attention.elements.conversion import load_cached
from tgis.shard.kernels.cpu.attention.elements.float8 import FORMATS, find_nan
from tgis.shard.kernels.cpu.attention.elements.int8 import CODE
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I1, I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, prefer_512_bits, store

_ROW = 4 * SPAN  # bytes per channel of copied keys
_CONVERTED = (*FORMATS, CODE, types.uint16, types.int16)


@llvm_function(types.boolean)
def is_converted(b: Any, element: Any) -> Any:
    """Return True if products convert elements of this type to float32."""
    return I1(element in _CONVERTED)


@llvm_function()
def widen_span(
    b: Any, to: Any, places: Any, key_stride: Any, value_stride: Any, head_dim: Any, depth: Any, element: Any
) -> None:
    """Write keys [head_dim, SPAN], then values [SPAN, depth], as float32 to the address `to`. places: address
    of int64 [4, GROUPS] (see `Scratch`). key_stride, value_stride: bytes between rows of a page. Does nothing
    for pairs."""
    if element not in _CONVERTED:
        return
    prefer_512_bits(b)
    keys, values = (
        [b.load(llvm.pointer_to(b, I64, places, I64(8 * (first + v)))) for v in range(GROUPS)]
        for first in (0, 2 * GROUPS)
    )

    begin = b.add(to, b.mul(head_dim, I64(_ROW)))  # of the copied values

    def write_channel(d: Any, _: list[Any]) -> list[Any]:
        for v, base in enumerate(keys):
            x = load_cached(b, base, b.mul(d, key_stride), element)
            store(b, x, to, b.add(b.mul(d, I64(_ROW)), I64(4 * LANES * v)))
        return []

    def write_value(k: Any, _: list[Any]) -> list[Any]:
        def write_vector(c: Any, _: list[Any]) -> list[Any]:
            for v, base in enumerate(values):
                offset = b.add(b.mul(k, value_stride), b.mul(c, I64(element.bitwidth // 8)))
                row = b.mul(b.add(k, I64(LANES * v)), depth)
                store(b, load_cached(b, base, offset, element), begin, b.mul(b.add(row, c), I64(4)))
            return []

        llvm.loop_range(b, I64(0), depth, LANES, [], write_vector)
        return []

    llvm.loop(b, head_dim, [], write_channel)
    if element == types.int8:
        for v, base in enumerate(keys):
            first = b.fadd(load_cached(b, base, I64(0), element), find_nan(b, base, LANES), **FUSED)
            store(b, first, to, I64(4 * LANES * v))
    llvm.loop(b, I64(LANES), [], write_value)
