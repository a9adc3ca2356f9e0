"""Builders of the LLVM code of products of many rounded rows with codes. Codes of 4 bits are widened to bytes
once for all tiles of rows, not by each tile, and tiles share the prefetching of the piece that follows.

An element's bits are those of `inner_loop.py`: sums of integers are exact in any order."""

from functools import partial
from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import load_words
from tgis.shard.kernels.cpu.codes.inner_loop import (
    ROUNDED_STRIDE,
    add_scaled,
    load_quads,
    load_zeros,
    multiply_quads,
    take_bytes,
)
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, UNIT, VECTORS
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I32, I64

# Most rows of a tile: its sums, the bytes of four columns and one vector of x fill the processor's registers.
ROWS = 6 if LANES == 16 else 2
MANY_ROWS = ROWS  # from this many rows on, codes are widened once and not for each tile
TALL = 2  # least rows of a tile when MANY_ROWS rows or more are cut into tiles of equal height
WIDE_UNIT = UNIT * COLUMNS  # bytes of a unit of widened codes
LINE = 64  # bytes of a cache line

_WORDS, _FLOATS = ir.VectorType(I32, LANES), ir.VectorType(FLOAT, LANES)


@llvm_function()
def widen(b: Any, to: Any, piece: Any, units: Any) -> None:
    """Write codes of 4 bits as bytes, in the layout of units of 8 bits."""

    def widen_unit(u: Any, _: list[Any]) -> list[Any]:
        unit, target = b.add(piece, b.mul(u, I64(WIDE_UNIT // 2))), b.add(to, b.mul(u, I64(WIDE_UNIT)))
        for v, words in enumerate(load_words(b, unit, 4)):
            for i, quads in enumerate(take_bytes(b, words, 4)):
                place = llvm.pointer_to(b, _WORDS, target, I64(4 * (i * COLUMNS + v * LANES)))
                b.store(quads, place, align=LINE)
        return []

    llvm.loop(b, units, [], widen_unit)


@llvm_function()
def multiply_wide_tile(
    b: Any,
    rows: Any,
    out: Any,
    x: Any,
    codes: Any,
    scales: Any,
    zeros: Any,
    units: Any,
    is_first: Any,
    ahead: Any,
    lines: Any,
    element: Any,
) -> None:
    """Compute out[:rows, :COLUMNS] += x[:rows] @ the codes of a piece, bytes. `rows` is TALL to ROWS. For each
    unit, the code prefetches `lines` cache lines from `ahead` on. For the others see `multiply_tile`."""
    end = b.append_basic_block("end")
    cases = b.switch(rows, end)
    for num_rows in range(TALL, ROWS + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        begins = [b.add(x, I64(ROUNDED_STRIDE * r)) for r in range(num_rows)]
        corrections = [b.load(llvm.pointer_to(b, I32, row, I64(4)), align=4) for row in begins]
        # They are sums times -128; codes are more than integers by half their range.
        less = [b.ashr(each, I32(8 - KINDS[element].bits)) for each in corrections]
        initial = [llvm.broadcast(b, each, LANES) for each in less for _ in range(VECTORS)]
        sums = llvm.loop(b, units, initial, partial(_add_unit, b, begins, codes, ahead, lines))
        exact = _subtract_zeros(b, [b.sitofp(total, _FLOATS) for total in sums], corrections, zeros)
        add_scaled(b, exact, begins, out, scales, is_first)
        b.branch(end)
    b.position_at_end(end)


def _add_unit(
    b: Any, rows: list[Any], codes: Any, ahead: Any, lines: Any, u: Any, sums: list[Any]
) -> list[Any]:
    line = b.add(ahead, b.mul(u, b.mul(lines, I64(LINE))))

    def prefetch(i: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch(b, line, b.mul(i, I64(LINE)))
        return []

    llvm.loop_range(b, I64(0), lines, 1, [], prefetch)
    words = load_words(b, b.add(codes, b.mul(u, I64(WIDE_UNIT))), 8)
    for i in range(2):
        quads = load_quads(b, rows, u, i)
        cells = [(quad, each[i]) for quad in quads for each in words]
        sums = [multiply_quads(b, total, *cell) for total, cell in zip(sums, cells, strict=True)]
    return sums


def _subtract_zeros(b: Any, sums: list[Any], corrections: list[Any], zeros: Any) -> list[Any]:
    """Emit sums - zeros * the sums of the rows, which is exact, unless `zeros` is 0."""
    before, changed = b.block, []
    with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
        factors = [b.fmul(load_zeros(b, zeros, v), llvm.constant(1 / 128, LANES)) for v in range(VECTORS)]
        of_rows = [b.sitofp(llvm.broadcast(b, each, LANES), _FLOATS) for each in corrections]
        changed = llvm.add_products(b, sums, of_rows, factors)
        inside = b.block
    return [llvm.choose(b, before, old, inside, new) for old, new in zip(sums, changed, strict=True)]


@llvm_function()
def prefetch_out(b: Any, out: Any, stride: Any, rows: Any) -> None:
    """Prefetch COLUMNS float32 of rows that will be written."""

    def prefetch_row(r: Any, _: list[Any]) -> list[Any]:
        row = b.add(out, b.mul(r, stride))
        for offset in range(0, 4 * COLUMNS, LINE):
            llvm.prefetch_for_writing(b, row, I64(offset))
        return []

    llvm.loop(b, rows, [], prefetch_row)
