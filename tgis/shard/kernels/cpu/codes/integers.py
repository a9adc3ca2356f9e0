"""Builders of the LLVM code that converts the codes of a unit to unsigned integers of 8 or 16 bits, which are
the codes plus half their range."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import load_parts, load_words
from tgis.shard.kernels.cpu.codes.integer_sums import take_bytes
from tgis.shard.kernels.cpu.codes.layout import UNIT, VECTORS, Kind, list_parts
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import I8, I32, I64

_WORDS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)


def emit_words(b: Any, kind: Kind, unit: Any, wide_bits: int) -> list[list[Any]]:
    """Emit the integers of a unit: for each vector of columns, 32-bit words with a column's codes in order,
    the first in the lowest bits."""
    if kind.is_packed:
        return _cut_packed(b, unit, kind.bits, wide_bits)
    words = [take_bytes(b, each, kind.bits) for each in load_words(b, unit, kind.bits)]
    if wide_bits == 8:
        return words
    return [[half for word in each for half in _split_bytes(b, word)] for each in words]


def _split_bytes(b: Any, word: Any) -> list[Any]:
    """Emit the lower and the upper two bytes of words as 16-bit numbers."""
    values = b.bitcast(word, _BYTES)
    zero = llvm.constant(0, 4 * LANES, I8)
    halves = []
    for half in range(2):
        lanes = [4 * LANES if i % 2 else 4 * (i // 4) + 2 * half + i % 4 // 2 for i in range(4 * LANES)]
        halves.append(b.bitcast(llvm.shuffle(b, values, zero, lanes), _WORDS))
    return halves


def _cut_packed(b: Any, unit: Any, bits: int, wide_bits: int) -> list[list[Any]]:
    """Emit the integers of packed codes."""
    per_word = 32 // wide_bits
    half = 1 << (bits - 1)
    middle = sum(half << (wide_bits * i) for i in range(per_word))
    words_of_vectors = []
    for v in range(VECTORS):
        strip, column = divmod(v, VECTORS // 2)
        begin = b.add(unit, I64(UNIT * bits * LANES // 8 * (VECTORS // 2) * strip))
        parts = load_parts(b, begin, bits, LANES * column)
        words = []
        for first in range(0, UNIT, per_word):
            bits_of_codes = [
                _move(b, parts, field, wide_bits * i)
                for i in range(per_word)
                for field in list_fields(bits, first + i)
            ]
            joined = bits_of_codes[0]
            for each in bits_of_codes[1:]:
                joined = b.or_(joined, each)
            words.append(b.xor(joined, llvm.constant(middle, LANES, I32)))
        words_of_vectors.append(words)
    return words_of_vectors


class Field(NamedTuple):
    """Contiguous bits of a code in a part of a strip."""

    part: int
    begin: int  # first bit in the part
    num_bits: int
    place: int  # position of the first bit in the code


def list_fields(bits: int, k: int) -> Iterator[Field]:
    """Yield the fields of code k of a unit of packed codes."""
    for i, part in enumerate(list_parts(bits)):
        if part.first <= k < part.first + part.num_codes:
            yield Field(i, bits * (k - part.first), bits, 0)
        elif k == UNIT - 1 and part.rest:
            yield Field(i, bits * part.num_codes, part.rest, part.taken)


def _move(b: Any, parts: list[Any], field: Field, to: int) -> Any:
    """Emit a field, moved to its position in the code that begins at bit `to`, with all other bits zero."""
    distance = field.begin - field.place - to
    word = parts[field.part]
    if distance:
        shift = b.lshr if distance > 0 else b.shl
        word = shift(word, llvm.constant(abs(distance), LANES, I32))
    mask = ((1 << field.num_bits) - 1) << (to + field.place)
    return b.and_(word, llvm.constant(mask, LANES, I32))
