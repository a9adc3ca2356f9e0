"""Builders of the LLVM code of products of many rows with codes. The codes of a piece are widened once for
all tiles, to float32 or, with rounded activations, to integers of 8 or 16 bits. The tiles share the
prefetching of the next piece.

An element has the same bits as in `inner_loop.py`: float32 operations have the same order, and sums of
integers are exact in any order."""

from functools import partial
from typing import Any

from tgis.shard.kernels.cpu.codes.conversion import emit_numbers, load_table
from tgis.shard.kernels.cpu.codes.inner_loop import (
    STRIDE,
    RoundedSums,
    Strip,
    Tile,
    add_scaled,
    load_float_sums,
    loop_units,
    multiply_strips,
    subtract_products,
)
from tgis.shard.kernels.cpu.codes.integer_sums import BYTES_STRIDE, PAIRS_STRIDE, find_wide_bits
from tgis.shard.kernels.cpu.codes.integers import emit_words
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, UNIT, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I64

# Maximum rows of a tile. Its sums, the codes of a column and one number of x fill the registers. Sums of
# integers need more of them with AVX2.
ROWS = 6
ROUNDED_ROWS = 6 if LANES == 16 else 5
_STRIPS = 1 if LANES == 16 else 2  # strips of a panel
TALL = 3  # minimum rows of a tile if more than ROWS rows are split into tiles of equal height
# Bytes of a unit of codes widened to bytes. float32 needs four times as many.
WIDE_UNIT = UNIT * COLUMNS
LINE = 64  # bytes of a cache line


def find_wide_unit(kind: Kind) -> int:
    """Return the bytes of a unit of a widened piece."""
    return WIDE_UNIT // 8 * (find_wide_bits(kind.bits) if kind.rounds_activations else 32)


@llvm_function()
def widen(b: Any, to: Any, piece: Any, units: Any, table: Any, element: Any) -> None:
    """Widen the codes of a piece's units to values, float32 [UNIT, COLUMNS] per unit, or with rounded
    activations to unsigned integers of `find_wide_bits` bits, words [words, COLUMNS] with as many codes of a
    column as fit."""
    kind = KINDS[element]
    table_vectors = load_table(b, kind, table)
    step = WIDE_UNIT // 8 * kind.bits
    wide = find_wide_unit(kind)

    def widen_unit(u: Any, _: list[Any]) -> list[Any]:
        unit, target = b.add(piece, b.mul(u, I64(step))), b.add(to, b.mul(u, I64(wide)))
        if kind.rounds_activations:
            words = emit_words(b, kind, unit, find_wide_bits(kind.bits))
            vectors = [
                (COLUMNS * i + LANES * v, word) for v, each in enumerate(words) for i, word in enumerate(each)
            ]
        else:
            vectors = [
                (COLUMNS * k + LANES * v, vector)
                for k, first, numbers in emit_numbers(b, kind, unit, table_vectors)
                for v, vector in enumerate(numbers, first)
            ]
        for place, vector in vectors:
            b.store(vector, llvm.pointer_to(b, vector.type, target, I64(4 * place)), align=4 * LANES)
        return []

    llvm.loop(b, units, [], widen_unit)


class _FloatTile:
    """Sums of float32 products."""

    block_units = 1

    def __init__(self, b: Any, rows: list[Any], num_vectors: int):
        self._rows = rows
        self._num_vectors = num_vectors
        self.scales = list[Any]()
        self.initial = [llvm.constant(0.0, LANES)] * (len(rows) * num_vectors)

    def add_units(self, b: Any, sums: list[Any], u: Any, units: list[Any]) -> list[Any]:
        [unit] = units
        offset = b.mul(u, I64(4 * UNIT))
        vectors = [I64(4 * LANES * v) for v in range(self._num_vectors)]
        for k in range(UNIT):
            at = b.add(unit, I64(4 * COLUMNS * k))
            numbers = [llvm.load_vector(b, b.add(at, vector), LANES) for vector in vectors]
            places = [b.add(row, b.add(offset, I64(4 * k))) for row in self._rows]
            sums = llvm.add_products(b, sums, [llvm.load_broadcast(b, at, LANES) for at in places], numbers)
        return sums

    def finish(self, b: Any, sums: list[Any], zeros: Any) -> list[Any]:
        return subtract_products(b, sums, self._rows, zeros)

    def load_row_sums(self, b: Any) -> list[Any]:
        return load_float_sums(b, self._rows)


@llvm_function()
def multiply_wide_tile(
    b: Any,
    rows: Any,
    out: Any,
    x: Any,
    codes: Any,
    scales: Any,
    offsets: Any,
    zeros: Any,
    units: Any,
    ahead: Any,
    lines: Any,
    element: Any,
) -> None:
    """Compute out[:rows, :COLUMNS] += x[:rows] @ the widened codes of a piece.

    rows: TALL (1 for rounded activations and packed codes) to ROWS or ROUNDED_ROWS. The code prefetches
    `lines` cache lines per unit, beginning at `ahead`. For other arguments see `multiply_tile`."""
    end = b.append_basic_block("end")
    kind = KINDS[element]
    cases = b.switch(rows, end)
    stride = find_wide_stride(kind)
    least = 1 if kind.rounds_activations and kind.is_packed else TALL
    for num_rows in range(least, (ROUNDED_ROWS if kind.rounds_activations else ROWS) + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        begins = [b.add(x, I64(stride * r)) for r in range(num_rows)]
        tile = partial(_multiply_strip, b, kind, begins, units, ahead, lines)
        multiply_strips(b, _STRIPS, Strip(out, codes, scales, offsets, zeros), tile, 4)
        b.branch(end)
    b.position_at_end(end)


def find_wide_stride(kind: Kind) -> int:
    """Return the bytes between rows of x for widened pieces."""
    if kind.rounds_activations:
        return BYTES_STRIDE if find_wide_bits(kind.bits) == 8 else PAIRS_STRIDE
    return STRIDE


def _multiply_strip(
    b: Any, kind: Kind, rows: list[Any], units: Any, ahead: Any, lines: Any, strip: Strip
) -> None:
    """Emit the product of rows of x and a strip. Only the first strip prefetches."""
    if kind.rounds_activations:
        tile: Tile = RoundedSums(b, kind, find_wide_bits(kind.bits), rows, strip.num_vectors)
    else:
        tile = _FloatTile(b, rows, strip.num_vectors)
    unit_bytes = find_wide_unit(kind)
    if _STRIPS > 1:
        lines = b.select(b.icmp_signed("==", strip.index, I64(0)), lines, I64(0))

    def prefetch(begin: Any, i: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch(b, begin, b.mul(i, I64(LINE)))
        return []

    def add_units(u: Any, count: int, sums: list[Any]) -> list[Any]:
        begin = b.add(ahead, b.mul(u, b.mul(lines, I64(LINE))))
        llvm.loop_range(b, I64(0), b.mul(lines, I64(count)), 1, [], partial(prefetch, begin))
        offsets = [b.mul(b.add(u, I64(i)), I64(unit_bytes)) for i in range(count)]
        return tile.add_units(b, sums, u, [b.add(strip.codes, offset) for offset in offsets])

    sums = loop_units(b, tile, units, add_units)
    add_scaled(b, tile, tile.finish(b, sums, strip.zeros), strip)
