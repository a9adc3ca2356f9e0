"""Builders of the LLVM code of products of many rows with codes. A piece's codes are widened once for all
tiles of rows, to float32 or, where activations are rounded, to bytes. The tiles share the prefetching of the
piece that follows.

An element has the bits that `inner_loop.py` gives it: float32 numbers are multiplied and added in the same
order, and sums of integers are exact in any order."""

from functools import partial
from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import load_words
from tgis.shard.kernels.cpu.codes.inner_loop import (
    ROUNDED_STRIDE,
    STRIDE,
    add_scaled,
    load_quads,
    load_unit,
    load_zeros,
    multiply_quads,
    subtract_products,
    take_bytes,
)
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, UNIT, VECTORS, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I32, I64

# Most rows of a tile: its sums, the codes of a column and one number of x fill the processor's registers.
ROWS = 6 if LANES == 16 else 2
TALL = ROWS // 2  # least rows of a tile, when more than ROWS are cut into tiles of equal height
# Bytes of a unit of codes that are widened to bytes. Float32 takes four times as many.
WIDE_UNIT = UNIT * COLUMNS
LINE = 64  # bytes of a cache line

_WORDS, _FLOATS = ir.VectorType(I32, LANES), ir.VectorType(FLOAT, LANES)


@llvm_function()
def widen(b: Any, to: Any, piece: Any, units: Any, table: Any, element: Any) -> None:
    """Write the codes of a piece's units as the numbers that they stand for, [UNIT, COLUMNS] of float32 for
    each unit, or where activations are rounded as bytes in the layout of units of 8 bits."""
    kind = KINDS[element]
    numbers = llvm.load_vector(b, table, LANES)
    step, wide = WIDE_UNIT // 8 * kind.bits, WIDE_UNIT if kind.rounds_activations else 4 * WIDE_UNIT

    def widen_unit(u: Any, _: list[Any]) -> list[Any]:
        unit, target = b.add(piece, b.mul(u, I64(step))), b.add(to, b.mul(u, I64(wide)))
        if kind.rounds_activations:
            quads = [take_bytes(b, words, 4) for words in load_words(b, unit, 4)]
            vectors = [each[i] for i in range(2) for each in quads]
        else:
            convert = load_unit(b, kind, unit, numbers)
            vectors = [vector for k in range(UNIT) for vector in convert(k)]
        for i, vector in enumerate(vectors):
            b.store(vector, llvm.pointer_to(b, vector.type, target, I64(4 * LANES * i)), align=4 * LANES)
        return []

    llvm.loop(b, units, [], widen_unit)


class _FloatTile:
    """Sums of float32 products."""

    def __init__(self, b: Any, kind: Kind, x: Any, num_rows: int):
        self._x = [b.add(x, I64(STRIDE * r)) for r in range(num_rows)]
        self.scales: list[Any] = []
        self.initial, self.unit_bytes = [llvm.constant(0.0, LANES)] * (num_rows * VECTORS), 4 * WIDE_UNIT

    def add_unit(self, b: Any, sums: list[Any], u: Any, unit: Any) -> list[Any]:
        offset = b.mul(u, I64(4 * UNIT))
        for k in range(UNIT):
            at = b.add(unit, I64(4 * COLUMNS * k))
            numbers = [llvm.load_vector(b, b.add(at, I64(4 * LANES * v)), LANES) for v in range(VECTORS)]
            places = [b.add(row, b.add(offset, I64(4 * k))) for row in self._x]
            sums = llvm.add_products(b, sums, [llvm.load_broadcast(b, at, LANES) for at in places], numbers)
        return sums

    def finish(self, b: Any, sums: list[Any], zeros: Any) -> list[Any]:
        return subtract_products(b, sums, self._x, zeros)


class _RoundedTile:
    """Sums of integers by VNNI, which begin with what they are too large by because codes are unsigned."""

    def __init__(self, b: Any, kind: Kind, x: Any, num_rows: int):
        self.scales = self._x = [b.add(x, I64(ROUNDED_STRIDE * r)) for r in range(num_rows)]
        # Headers have rows' sums times -128. Codes are more than integers by half their range.
        self._sums = [b.load(llvm.pointer_to(b, I32, row, I64(4)), align=4) for row in self._x]
        excess = [b.ashr(each, I32(8 - kind.bits)) for each in self._sums]
        self.initial = [llvm.broadcast(b, each, LANES) for each in excess for _ in range(VECTORS)]
        self.unit_bytes = WIDE_UNIT

    def add_unit(self, b: Any, sums: list[Any], u: Any, unit: Any) -> list[Any]:
        words = load_words(b, unit, 8)
        for i in range(2):
            cells = [(quad, each[i]) for quad in load_quads(b, self._x, u, i) for each in words]
            sums = [multiply_quads(b, total, *cell) for total, cell in zip(sums, cells, strict=True)]
        return sums

    def finish(self, b: Any, sums: list[Any], zeros: Any) -> list[Any]:
        """Emit sums - zeros * the sums of the rows, as float32, which is exact."""
        exact, before = [b.sitofp(total, _FLOATS) for total in sums], b.block
        with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
            loaded = [load_zeros(b, zeros, v) for v in range(VECTORS)]
            factors = [b.fmul(each, llvm.constant(1 / 128, LANES)) for each in loaded]
            of_rows = [b.sitofp(llvm.broadcast(b, each, LANES), _FLOATS) for each in self._sums]
            changed = llvm.add_products(b, exact, of_rows, factors)
            inside = b.block
        return [llvm.choose(b, before, old, inside, new) for old, new in zip(exact, changed, strict=True)]


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
    """Compute out[:rows, :COLUMNS] += x[:rows] @ the widened codes of a piece. `rows` is TALL to ROWS. For
    each unit, the code prefetches `lines` cache lines from `ahead` on. For the others see `multiply_tile`."""
    end, kind = b.append_basic_block("end"), KINDS[element]
    cases, make_tile = b.switch(rows, end), _RoundedTile if kind.rounds_activations else _FloatTile
    for num_rows in range(TALL, ROWS + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        tile = make_tile(b, kind, x, num_rows)
        sums = llvm.loop(b, units, tile.initial, partial(_add_unit, b, tile, codes, ahead, lines))
        add_scaled(b, tile.finish(b, sums, zeros), tile.scales, out, scales, is_first)
        b.branch(end)
    b.position_at_end(end)


def _add_unit(
    b: Any, tile: _FloatTile | _RoundedTile, codes: Any, ahead: Any, lines: Any, u: Any, sums: list[Any]
) -> list[Any]:
    begin = b.add(ahead, b.mul(u, b.mul(lines, I64(LINE))))

    def prefetch(i: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch(b, begin, b.mul(i, I64(LINE)))
        return []

    llvm.loop_range(b, I64(0), lines, 1, [], prefetch)
    return tile.add_unit(b, sums, u, b.add(codes, b.mul(u, I64(tile.unit_bytes))))
