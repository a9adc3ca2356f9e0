"""Scales of keys and values that are stored as 8-bit integers (see `elements/int8.py`)."""

from typing import Any

from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN, for_groups
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, load, prefer_512_bits, store


@llvm_function()
def copy_scales(b: Any, to: Any, places: Any) -> None:
    """Copy the scales of a span's keys, and then those of its values, to the address `to`. Prefetch those of
    the next span. places: address of int64 [4, GROUPS] (see `Scratch`)."""
    for kind in range(2):
        for v in range(GROUPS):
            source, ahead = (
                b.load(llvm.pointer_to(b, I64, places, I64(8 * ((2 * kind + which) * GROUPS + v))))
                for which in range(2)
            )
            store(b, load(b, source, I64(0)), to, I64(4 * (kind * SPAN + v * LANES)))
            llvm.prefetch(b, ahead, I64(0))


@llvm_function()
def multiply_columns(b: Any, rows: Any, num_groups: Any, tile: Any, factors: Any) -> None:
    """Multiply the columns of a tile, [rows, SPAN], by factors, [SPAN], in place. num_groups: GROUPS, or half
    of it to multiply only the first half of the columns. tile, factors: addresses."""
    prefer_512_bits(b)

    def build(groups: int) -> None:
        columns = [load(b, factors, I64(4 * LANES * v)) for v in range(groups)]

        def multiply_row(r: Any, _: list[Any]) -> list[Any]:
            row = b.add(tile, b.mul(r, I64(4 * SPAN)))
            for v, column in enumerate(columns):
                offset = I64(4 * LANES * v)
                store(b, b.fmul(load(b, row, offset), column), row, offset)
            return []

        llvm.loop(b, rows, [], multiply_row)

    for_groups(b, num_groups, build)
