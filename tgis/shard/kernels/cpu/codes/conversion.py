"""Builders of the LLVM code that loads the codes of a unit and converts them to the float32 numbers that they
stand for. All conversions are exact, so sums have the same bits whichever instructions convert the codes."""

from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.layout import COLUMNS, UNIT, VECTORS
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I8, I32, I64

_WORDS, _FLOATS, _BYTES = (ir.VectorType(element, LANES) for element in (I32, FLOAT, I8))


def load_words(b: Any, unit: Any, bits: int, num_vectors: int = VECTORS) -> list[list[Any]]:
    """Emit the loads of a unit of words from an address: for each vector of columns, its words."""
    words = range(bits * UNIT // 32)
    offsets = [[4 * (i * COLUMNS + v * LANES) for i in words] for v in range(num_vectors)]
    return [[_load(b, _WORDS, unit, offset) for offset in each] for each in offsets]


def convert_words(b: Any, words: list[Any], k: int, table: Any) -> list[Any]:
    """Emit the numbers that codes k of words, of 4 bits, stand for."""
    indices = [b.lshr(word, llvm.constant(8 * (k % 4) + 4 * (k // 4), LANES, I32)) for word in words]
    if LANES == 16:  # the instruction ignores the upper bits of indices
        return [llvm.call(b, "llvm.x86.avx512.permvar.sf.512", _FLOATS, table, each) for each in indices]
    integers = [b.sitofp(b.and_(each, llvm.constant(15, LANES, I32)), _FLOATS) for each in indices]
    return [b.fadd(each, llvm.constant(-8.0, LANES)) for each in integers]


def convert_bytes(b: Any, unit: Any, k: int) -> list[Any]:
    """Emit the integers of 8 bits in row k of a unit of bytes."""
    places = [COLUMNS * k + LANES * v for v in range(VECTORS)]
    # A load that widens bytes takes one instruction less than cutting them out of words.
    return [b.sitofp(b.sext(_load(b, _BYTES, unit, place), _WORDS), _FLOATS) for place in places]


def _load(b: Any, vector: Any, unit: Any, offset: int) -> Any:
    return b.load(llvm.pointer_to(b, vector, unit, I64(offset)), align=vector.element.width // 8 * LANES)
