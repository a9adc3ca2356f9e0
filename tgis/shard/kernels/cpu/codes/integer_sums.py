"""Builders of the LLVM code that adds up products of codes, unsigned bytes, and rounded activations. Sums are
of integers and exact, so they have the same bits with every instruction set.

VNNI multiplies four bytes and adds the products up in 32 bits. AVX2 takes two instructions: `vpmaddubsw`
multiplies unsigned bytes with signed ones and adds adjacent products up in 16 bits, which may saturate, and
`vpmaddwd` with ones adds adjacent sums up in 32 bits."""

from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import load_words
from tgis.shard.kernels.cpu.codes.layout import UNIT, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.int8.inner_loop import AVX2, AVX512_VNNI, AVX_VNNI, HEADER, INSTRUCTION_SET
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import I8, I16, I32, I64

CAN_ROUND = INSTRUCTION_SET in (AVX512_VNNI, AVX_VNNI, AVX2) and INSTRUCTION_SET.lanes == LANES
"""True if the processor has the instructions of products that round activations."""
_HAS_VNNI = INSTRUCTION_SET is not AVX2
# Units whose products are added up in 16 bits before they are in 32. A code of 4 bits is at most 15 and an
# activation at most 127 in magnitude, so a pair of products is at most 2 * 15 * 127 = 3,810. A unit adds two
# pairs to each sum, and four units 8 * 3,810 = 30,480, which is less than 2**15: nothing saturates.
BLOCK = 1 if _HAS_VNNI else 4

_WORDS, _BYTES, _PAIRS = (
    ir.VectorType(I32, LANES),
    ir.VectorType(I8, 4 * LANES),
    ir.VectorType(I16, 2 * LANES),
)


def is_centred(kind: Kind) -> bool:
    """Return True if `add_units` multiplies by codes minus half their range, not by codes."""
    return kind.bits == 8 and not _HAS_VNNI


def add_units(
    b: Any, sums: list[Any], rows: list[Any], u: Any, units: list[Any], stored_bits: int, kind: Kind
) -> list[Any]:
    """Emit the addition of the products of unit u and those after it, at the addresses `units`, whose codes
    take up `stored_bits` bits. `rows` are addresses of rows of x, each with as many sums."""
    num_vectors, pairs = len(sums) // len(rows), list[Any]()
    for i, unit in enumerate(units):
        words = load_words(b, unit, stored_bits, num_vectors)
        weights = [take_bytes(b, each, stored_bits) for each in words]
        for half in range(2):
            quads = load_quads(b, rows, b.add(u, I64(i)), half)
            cells = [(quad, each[half]) for quad in quads for each in weights]
            if _HAS_VNNI:
                sums = [_multiply_quads(b, total, *cell) for total, cell in zip(sums, cells, strict=True)]
            elif kind.bits == 8:
                products = [_multiply_centred(b, *cell) for cell in cells]
                sums = [_widen_pairs(b, *each) for each in zip(sums, products, strict=True)]
            else:
                products = [_multiply_pairs(b, code, quad) for quad, code in cells]
                pairs = [b.add(*each) for each in zip(pairs, products, strict=True)] if pairs else products
    return [_widen_pairs(b, *each) for each in zip(sums, pairs, strict=True)] if pairs else sums


def take_bytes(b: Any, words: list[Any], bits: int) -> list[Any]:
    """Emit codes 0 to 3, and 4 to 7, of words."""
    if bits == 8:
        return words
    mask = llvm.constant(0x0F0F0F0F, LANES, I32)
    return [b.and_(words[0], mask), b.and_(b.lshr(words[0], llvm.constant(4, LANES, I32)), mask)]


def load_quads(b: Any, rows: list[Any], u: Any, i: int) -> list[Any]:
    """Emit the loads of activations 4i to 4i + 3 of unit u of rows of x, for all lanes."""
    offset = b.add(b.mul(u, I64(UNIT)), I64(HEADER + 4 * i))
    places = [llvm.pointer_to(b, I32, row, offset) for row in rows]
    return [llvm.broadcast(b, b.load(place, align=1), LANES) for place in places]


def _multiply_quads(b: Any, total: Any, x: Any, weights: Any) -> Any:
    return llvm.call(b, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", _WORDS, total, weights, x)


def _multiply_pairs(b: Any, unsigned: Any, signed: Any) -> Any:
    values = [b.bitcast(each, _BYTES) for each in (unsigned, signed)]
    return llvm.call(b, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, *values)


def _multiply_centred(b: Any, x: Any, codes: Any) -> Any:
    """Emit the sums of pairs of activations times codes of 8 bits minus 128. The sign of a code goes to the
    activation, so a pair is at most 2 * 128 * 127 = 32,512, which is less than 2**15: nothing saturates."""
    centred = b.bitcast(b.xor(codes, llvm.constant(-0x7F7F7F80, LANES, I32)), _BYTES)
    magnitude = llvm.call(b, f"llvm.abs.v{4 * LANES}i8", _BYTES, centred, llvm.I1(0))
    signed = llvm.call(b, "llvm.x86.avx2.psign.b", _BYTES, b.bitcast(x, _BYTES), centred)
    return _multiply_pairs(b, magnitude, signed)


def _widen_pairs(b: Any, total: Any, pairs: Any) -> Any:
    """Emit total + the sums of adjacent numbers of 16 bits."""
    ones = llvm.constant(1, 2 * LANES, I16)
    return b.add(total, llvm.call(b, "llvm.x86.avx2.pmadd.wd", _WORDS, pairs, ones))
