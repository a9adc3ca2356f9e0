"""Builders of the LLVM code that loads the codes of a unit and converts them to float32. All conversions are
exact, so sums have the same bits whichever instructions convert the codes."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.layout import COLUMNS, UNIT, VECTORS, Kind, list_parts
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I8, I16, I32, I64

_WORDS, _FLOATS, _BYTES = (ir.VectorType(element, LANES) for element in (I32, FLOAT, I8))
_ROW = ir.VectorType(I8, COLUMNS)
_PAIRS = ir.VectorType(I16, COLUMNS // 2)


def load_table(b: Any, kind: Kind, address: Any) -> list[Any]:
    """Emit the loads of the table of 4-bit codes in the form that `emit_numbers` needs. With AVX2 or NEON
    it is a vector for each of the four bytes of the numbers, without bytes that are zero in all numbers."""
    if kind.is_packed:
        return []
    if not kind.has_halves:
        return [llvm.load_vector(b, address, LANES)]
    planes = [_load_half(b, address, 16 * i) for i in range(0 if kind.has_any_numbers else 2, 4)]
    return [llvm.shuffle(b, plane, plane, [*range(16)] * 2) for plane in planes]


def _load_half(b: Any, address: Any, offset: int) -> Any:
    return b.load(llvm.pointer_to(b, ir.VectorType(I8, 16), address, I64(offset)), align=16)


class Numbers(NamedTuple):
    """Values of the codes in row `k` of a unit, for adjacent vectors of columns beginning with `first`."""

    k: int
    first: int
    vectors: list[Any]


def emit_numbers(
    b: Any, kind: Kind, unit: Any, table: list[Any], num_vectors: int = VECTORS
) -> Iterator[Numbers]:
    """Emit the loads and conversions of a unit for products without rounded activations. Yields rows in
    order, so that few numbers occupy registers at a time."""
    if kind.has_halves:
        yield from _convert_halves(b, unit, table, num_vectors)
    elif kind.is_packed:
        yield from _convert_packed(b, unit, kind.bits, num_vectors)
    elif kind.bits == 8:
        yield from (Numbers(k, 0, _convert_bytes(b, unit, k, num_vectors)) for k in range(UNIT))
    else:
        words = [word for [word] in load_words(b, unit, kind.bits, num_vectors)]
        yield from (Numbers(k, 0, _convert_words(b, words, k, table[0])) for k in range(UNIT))


def load_words(b: Any, unit: Any, bits: int, num_vectors: int = VECTORS) -> list[list[Any]]:
    """Emit the loads of a unit of words at an address: for each vector of columns, its words."""
    words = range(bits * UNIT // 32)
    offsets = [[4 * (i * COLUMNS + v * LANES) for i in words] for v in range(num_vectors)]
    return [[_load(b, _WORDS, unit, offset) for offset in each] for each in offsets]


def _convert_words(b: Any, words: list[Any], k: int, table: Any) -> list[Any]:
    """Emit the values of the 4-bit codes k of words."""
    indices = [b.lshr(word, llvm.constant(8 * (k % 4) + 4 * (k // 4), LANES, I32)) for word in words]
    if LANES == 16:  # the instruction ignores the upper bits of indices
        return [llvm.call(b, "llvm.x86.avx512.permvar.sf.512", _FLOATS, table, each) for each in indices]
    integers = [b.sitofp(b.and_(each, llvm.constant(15, LANES, I32)), _FLOATS) for each in indices]
    return [b.fadd(each, llvm.constant(-8.0, LANES)) for each in integers]


def _convert_halves(b: Any, unit: Any, table: list[Any], num_vectors: int) -> Iterator[Numbers]:
    """Emit the values of bytes that hold two codes: look-ups of each byte of the numbers, then interleaving
    of the bytes. A look-up covers two rows of half of a panel's columns."""
    for k, first in product(range(0, UNIT, 2), range(0, num_vectors, 2)):
        place = I64(UNIT * COLUMNS // 8 * first + COLUMNS * (k // 4))
        row = b.load(llvm.pointer_to(b, _WORDS, unit, place), align=COLUMNS)
        codes = b.lshr(row, llvm.constant(4, LANES, I32)) if k % 4 else row
        indices = b.bitcast(b.and_(codes, llvm.constant(0x0F0F0F0F, LANES, I32)), _ROW)
        looked_up = [_look_up(b, plane, indices) for plane in table]
        for high in range(2):
            yield Numbers(k + high, first, _join_bytes(b, looked_up, high))


def _look_up(b: Any, plane: Any, indices: Any) -> Any:
    """Emit the look-up of 32 bytes in a table, which both halves of `plane` contain. Indices are below 16."""
    if not llvm.has_feature("neon"):
        return llvm.call(b, "llvm.x86.avx2.pshuf.b", _ROW, plane, indices)
    halves = []
    for first in (0, 16):
        lanes = list(range(first, first + 16))
        table, chosen = (llvm.shuffle(b, each, each, lanes) for each in (plane, indices))
        halves.append(llvm.call(b, "llvm.aarch64.neon.tbl1.v16i8", table.type, table, chosen))
    return llvm.shuffle(b, halves[0], halves[1], list(range(32)))


def _join_bytes(b: Any, planes: list[Any], high: int) -> list[Any]:
    """Emit two vectors of numbers from the vectors of their bytes. Bytes that are always zero are omitted."""
    upper = _interleave(b, planes[-2], planes[-1], high)
    if len(planes) == 4:
        lower = _interleave(b, planes[0], planes[1], high)
        first, second = (b.bitcast(each, _PAIRS) for each in (lower, upper))
        numbers = [_interleave(b, first, second, part) for part in range(2)]
    else:
        words = b.bitcast(upper, _WORDS)
        width = llvm.constant(16, LANES, I32)
        numbers = [b.shl(words, width), b.and_(words, llvm.constant(-0x10000, LANES, I32))]
    return [b.bitcast(number, _FLOATS) for number in numbers]


def _interleave(b: Any, first: Any, second: Any, high: int) -> Any:
    """Emit the interleaved elements of the lower (0) or upper (1) parts of both halves of vectors."""
    size = first.type.count
    begins = (high * size // 4, size // 2 + high * size // 4)
    lanes = [lane for begin in begins for i in range(begin, begin + size // 4) for lane in (i, size + i)]
    return llvm.shuffle(b, first, second, lanes)


def _convert_bytes(b: Any, unit: Any, k: int, num_vectors: int) -> list[Any]:
    """Emit the integers of 8 bits in row k of a unit of bytes."""
    places = [COLUMNS * k + LANES * v for v in range(num_vectors)]
    # A widening load takes one instruction less than extracting bytes from words.
    return [b.sitofp(b.sext(_load(b, _BYTES, unit, place), _WORDS), _FLOATS) for place in places]


def _convert_packed(b: Any, unit: Any, bits: int, num_vectors: int) -> Iterator[Numbers]:
    """Emit the integers of packed codes, strip by strip."""
    half = VECTORS // 2
    for strip in range(0, num_vectors, half):
        begin = b.add(unit, I64(UNIT * bits * LANES // 8 * strip))
        words = [load_parts(b, begin, bits, LANES * v) for v in range(half)]
        for k in range(UNIT):
            integers = [_cut_code(b, each, bits, k) for each in words]
            yield Numbers(k, strip, [b.sitofp(each, _FLOATS) for each in integers])


def load_parts(b: Any, strip: Any, bits: int, column: int) -> list[Any]:
    """Emit the loads of the parts of a vector of columns as words."""
    words = []
    for part in list_parts(bits):
        place = I64(COLUMNS // 2 * part.offset + part.size * column)
        kind = ir.VectorType(ir.IntType(8 * part.size), LANES)
        loaded = b.load(llvm.pointer_to(b, kind, strip, place), align=part.size)
        words.append(loaded if part.size == 4 else b.zext(loaded, _WORDS))
    return words


def _cut_code(b: Any, words: list[Any], bits: int, k: int) -> Any:
    """Emit code k from the words of a column's parts."""
    pieces = []
    parts = list_parts(bits)
    for part, word in zip(parts, words, strict=True):
        if part.first <= k < part.first + part.num_codes:
            shifted = b.shl(word, llvm.constant(32 - bits * (k - part.first + 1), LANES, I32))
            return b.ashr(shifted, llvm.constant(32 - bits, LANES, I32))
        if part.rest:
            shifted = b.shl(word, llvm.constant(32 - 8 * part.size, LANES, I32))
            shift = b.ashr if part is parts[-1] else b.lshr
            piece = shift(shifted, llvm.constant(32 - part.rest, LANES, I32))
            pieces.append(b.shl(piece, llvm.constant(part.taken, LANES, I32)))
    return b.or_(*pieces)


def _load(b: Any, vector: Any, unit: Any, offset: int) -> Any:
    return b.load(llvm.pointer_to(b, vector, unit, I64(offset)), align=vector.element.width // 8 * LANES)
