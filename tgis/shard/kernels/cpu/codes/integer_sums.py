"""Builders of the LLVM code that sums products of codes, unsigned integers, and rounded activations. Sums of
integers are exact, so they have the same bits with every instruction set.

VNNI multiplies four bytes and adds the products in 32 bits. AVX2 needs two instructions: `vpmaddubsw`
multiplies unsigned by signed bytes and adds adjacent products in 16 bits, which may saturate; `vpmaddwd` with
ones adds adjacent sums in 32 bits. For codes of 6 and 8 bits, whose products would saturate, `vpmaddwd`
multiplies codes and activations of 16 bits. ARM's dot product is like VNNI with signed bytes."""

from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import load_words
from tgis.shard.kernels.cpu.codes.layout import PIECE, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.int8.inner_loop import (
    ARM_DOT,
    AVX2,
    AVX512_VNNI,
    AVX_VNNI,
    HEADER,
    INSTRUCTION_SET,
    add_signed_quads,
)
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import I8, I16, I32, I64

CAN_ROUND = INSTRUCTION_SET in (AVX512_VNNI, AVX_VNNI, AVX2, ARM_DOT) and INSTRUCTION_SET.lanes == LANES
"""True if the processor has instructions for products with rounded activations."""
_ADDS_QUADS = INSTRUCTION_SET is not AVX2
"""True if an instruction multiplies four bytes and adds the products in 32 bits."""
# Offsets in a piece of a row of rounded activations: the scaled sum (float32); the negative of the excess
# that unsigned codes cause in sums (int32); then the fields of int8 products: the scale (float32), the sum
# times -128 (int32), and the activations (8 or 16 bits).
ROW_SUM, EXCESS, SCALE, CORRECTION = 0, 4, 8, 12
VALUES = SCALE + HEADER
BYTES_STRIDE = VALUES + PIECE
PAIRS_STRIDE = VALUES + 2 * PIECE
"""Bytes between pieces of rows of 8-bit and of 16-bit activations."""

_WORDS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)
_PAIRS = ir.VectorType(I16, 2 * LANES)


def find_wide_bits(bits: int) -> int:
    """Return the bits of a code in a widened piece: 16 if `vpmaddubsw` would saturate, otherwise 8."""
    return 8 if _ADDS_QUADS or bits <= 5 else 16


def count_block_units(kind: Kind, stored_bits: int) -> int:
    """Return the number of units whose products are added in 16 bits before the sums are widened to 32 bits.

    With 4-bit codes, up to 15, and activations of magnitude up to 127, a pair of products is at most
    2 * 15 * 127 = 3,810. A unit adds two pairs to each sum, so four units give 8 * 3,810 = 30,480 < 2**15,
    which does not saturate. Neither do two units of 5-bit codes: 4 * 7,874 = 31,496."""
    if _ADDS_QUADS or stored_bits == 16 or kind.bits == 8:
        return 1
    return 2 if kind.bits == 5 else 4


def is_centred(kind: Kind, stored_bits: int) -> bool:
    """Return True if `add_units` multiplies by codes minus half their range."""
    return kind.bits == 8 and stored_bits == 8 and INSTRUCTION_SET in (AVX2, ARM_DOT)


def add_units(
    b: Any, sums: list[Any], rows: list[Any], u: Any, units: list[Any], stored_bits: int, kind: Kind
) -> list[Any]:
    """Emit the addition of the products of units u, u + 1, ..., at the addresses `units`, with codes of
    `stored_bits` bits. `rows` are addresses of rows of x. Each row has the same number of sums."""
    num_vectors = len(sums) // len(rows)
    pairs = list[Any]()
    for i, unit in enumerate(units):
        words = load_words(b, unit, stored_bits, num_vectors)
        weights = [take_bytes(b, each, stored_bits) for each in words]
        if _ADDS_QUADS and is_centred(kind, stored_bits):
            weights = [[_centre(b, word) for word in each] for each in weights]
        for j in range(len(weights[0])):
            factors = _load_factors(b, rows, b.add(u, I64(i)), j, len(weights[0]))
            cells = [(factor, each[j]) for factor in factors for each in weights]
            if _ADDS_QUADS:
                sums = [_multiply_quads(b, total, *cell) for total, cell in zip(sums, cells, strict=True)]
            elif stored_bits == 16:
                products = [_add_pairs(b, *cell) for cell in cells]
                sums = [b.add(*each) for each in zip(sums, products, strict=True)]
            elif kind.bits == 8:
                products = [_multiply_centred(b, *cell) for cell in cells]
                sums = [_widen_pairs(b, *each) for each in zip(sums, products, strict=True)]
            else:
                products = [_multiply_pairs(b, code, quad) for quad, code in cells]
                pairs = [b.add(*each) for each in zip(pairs, products, strict=True)] if pairs else products
    return [_widen_pairs(b, *each) for each in zip(sums, pairs, strict=True)] if pairs else sums


def take_bytes(b: Any, words: list[Any], bits: int) -> list[Any]:
    """Emit words whose codes have 8 or 16 bits. 4-bit codes become two words, codes 0 to 3 and 4 to 7."""
    if bits >= 8:
        return words
    mask = llvm.constant(0x0F0F0F0F, LANES, I32)
    return [b.and_(words[0], mask), b.and_(b.lshr(words[0], llvm.constant(4, LANES, I32)), mask)]


def _load_factors(b: Any, rows: list[Any], u: Any, j: int, count: int) -> list[Any]:
    """Emit the loads of word j of `count` words of activations of unit u, per row of x, broadcast to all
    lanes."""
    offset = b.add(b.mul(u, I64(4 * count)), I64(VALUES + 4 * j))
    places = [llvm.pointer_to(b, I32, row, offset) for row in rows]
    return [llvm.broadcast(b, b.load(place, align=1), LANES) for place in places]


def _multiply_quads(b: Any, total: Any, x: Any, weights: Any) -> Any:
    if INSTRUCTION_SET is ARM_DOT:
        return add_signed_quads(b, total, x, weights)
    return llvm.call(b, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", _WORDS, total, weights, x)


def _multiply_pairs(b: Any, unsigned: Any, signed: Any) -> Any:
    values = [b.bitcast(each, _BYTES) for each in (unsigned, signed)]
    return llvm.call(b, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, *values)


def _centre(b: Any, codes: Any) -> Any:
    """Emit 8-bit codes minus 128, as signed bytes."""
    return b.xor(codes, llvm.constant(-0x7F7F7F80, LANES, I32))


def _multiply_centred(b: Any, x: Any, codes: Any) -> Any:
    """Emit the sums of pairs of activations times 8-bit codes minus 128. The sign of the code is moved to the
    activation, so a pair is at most 2 * 128 * 127 = 32,512 < 2**15, which does not saturate."""
    centred = b.bitcast(_centre(b, codes), _BYTES)
    magnitude = llvm.call(b, f"llvm.abs.v{4 * LANES}i8", _BYTES, centred, llvm.I1(0))
    signed = llvm.call(b, "llvm.x86.avx2.psign.b", _BYTES, b.bitcast(x, _BYTES), centred)
    return _multiply_pairs(b, magnitude, signed)


def _widen_pairs(b: Any, total: Any, pairs: Any) -> Any:
    """Emit total + the sums of adjacent 16-bit numbers."""
    return b.add(total, _add_pairs(b, pairs, llvm.constant(1, 2 * LANES, I16)))


def _add_pairs(b: Any, first: Any, second: Any) -> Any:
    """Emit the sums of products of adjacent 16-bit numbers."""
    values = [b.bitcast(each, _PAIRS) for each in (first, second)]
    return llvm.call(b, "llvm.x86.avx2.pmadd.wd", _WORDS, *values)
