"""Builder of the LLVM code that widens codes to the elements of AMX tiles: pairs of bfloat16, in which
integers of up to 8 bits are exact, or, with rounded activations, quads of signed bytes.

A widened piece has a row of COLUMNS pairs for every two columns of x, in the order of `find_pair_order`, or a
row of COLUMNS quads for every four columns of x."""

from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.conversion import emit_numbers, load_table, load_words
from tgis.shard.kernels.cpu.codes.integers import emit_words
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, UNIT, UNIT_BIT, VECTORS, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I8, I16, I32, I64

WIDE_ROW = 4 * COLUMNS  # bytes of a row of pairs or quads
PAIRS_UNIT, QUADS_UNIT = (WIDE_ROW * UNIT // values for values in (2, 4))
"""Bytes of a unit of widened codes."""
_LINE = 64  # bytes of a cache line
# Bits by which a word of 4-bit codes is shifted to look up each pair of a unit.
_SHIFTS = (0, 8, 4, 12)

_WORDS = ir.VectorType(I16, 2 * LANES)
_INTEGERS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)


def find_pair_order(bits: int) -> tuple[int, ...]:
    """Return the columns of x in a unit in the order of pairs. A 32-bit word has 4-bit codes 0, 4, 1, 5 in
    its lower half and 2, 6, 3, 7 in its upper half, and one look-up covers both halves."""
    return (0, 2, 1, 3, 4, 6, 5, 7) if bits == 4 else tuple(range(UNIT))


def find_wide_unit(kind: Kind) -> int:
    """Return the bytes of a unit of widened codes."""
    return QUADS_UNIT if kind.rounds_activations else PAIRS_UNIT


@llvm_function()
def widen_for_tiles(
    b: Any, to: Any, tile_bytes: Any, piece: Any, units: Any, table: Any, ahead: Any, element: Any
) -> None:
    """Widen the codes of a piece's units. The numbers of a table must fit bfloat16. The code prefetches the
    same number of units at the address `ahead`."""
    kind = KINDS[element]
    is_looked_up = kind.bits == 4 and LANES == 16
    unit_rows = find_wide_unit(kind) // WIDE_ROW
    step_units = TILE_ROWS // unit_rows
    if kind.rounds_activations:
        tables = list[Any]()
    else:
        tables = [_load_words_table(b, table)] if is_looked_up else load_table(b, kind, table)

    def widen_unit(u: Any, _: list[Any]) -> list[Any]:
        offset = b.mul(u, I64(UNIT_BIT * kind.bits))
        prefetch_unit(b, b.add(ahead, offset), kind)
        unit = b.add(piece, offset)
        step, within = b.sdiv(u, I64(step_units)), b.srem(u, I64(step_units))
        begin = b.add(to, b.mul(step, b.mul(tile_bytes, I64(VECTORS))))
        begin = b.add(begin, b.mul(within, I64(unit_rows * ROW_BYTES)))
        targets = [b.add(begin, b.mul(tile_bytes, I64(v))) for v in range(VECTORS)]
        if kind.rounds_activations:
            _centre_quads(b, kind, unit, targets)
        elif is_looked_up:
            _look_up_pairs(b, unit, targets, tables[0])
        else:
            _join_numbers(b, kind, unit, targets, tables)
        return []

    llvm.loop(b, units, [], widen_unit)


def prefetch_unit(b: Any, at: Any, kind: Kind) -> None:
    for line in range(0, UNIT_BIT * kind.bits, _LINE):
        llvm.prefetch(b, at, I64(line))


def _load_words_table(b: Any, address: Any) -> Any:
    """Emit the upper halves of 16 floats, twice, so that the fifth bit of an index has no effect."""
    floats = b.bitcast(llvm.load_vector(b, address, LANES), _INTEGERS)
    halves = b.trunc(b.lshr(floats, llvm.constant(16, LANES, I32)), ir.VectorType(I16, LANES))
    return llvm.shuffle(b, halves, halves, [*range(LANES)] * 2)


def _look_up_pairs(b: Any, unit: Any, targets: list[Any], table: Any) -> None:
    for v, [word] in enumerate(load_words(b, unit, 4)):
        codes = b.bitcast(word, _WORDS)
        for pair, shift in enumerate(_SHIFTS):
            indices = b.lshr(codes, llvm.constant(shift, 2 * LANES, I16)) if shift else codes
            pairs = llvm.call(b, "llvm.x86.avx512.permvar.hi.512", _WORDS, table, indices)
            _store(b, b.bitcast(pairs, _INTEGERS), targets[v], pair)


def _join_numbers(b: Any, kind: Any, unit: Any, targets: list[Any], table: list[Any]) -> None:
    """Emit the upper halves of the floats of two rows of a unit as pairs."""
    first_rows: dict[int, list[Any]] = {}
    for k, first, numbers in emit_numbers(b, kind, unit, table, VECTORS):
        integers = [b.bitcast(each, _INTEGERS) for each in numbers]
        if k % 2 == 0:
            first_rows[first] = [b.lshr(each, llvm.constant(16, LANES, I32)) for each in integers]
            continue
        for i, (low, each) in enumerate(zip(first_rows[first], integers, strict=True)):
            high = b.and_(each, llvm.constant(-(1 << 16), LANES, I32))
            _store(b, b.or_(low, high), targets[first + i], k // 2)


def _centre_quads(b: Any, kind: Kind, unit: Any, targets: list[Any]) -> None:
    """Emit the unsigned codes of a unit minus half their range."""
    half = llvm.constant(1 << (kind.bits - 1), 4 * LANES, I8)
    for target, words in zip(targets, emit_words(b, kind, unit, 8), strict=True):
        for i, word in enumerate(words):
            centred = b.sub(b.bitcast(word, _BYTES), half)
            _store(b, b.bitcast(centred, _INTEGERS), target, i)


def _store(b: Any, elements: Any, target: Any, row: int) -> None:
    b.store(elements, llvm.pointer_to(b, _INTEGERS, target, I64(ROW_BYTES * row)), align=ROW_BYTES)
