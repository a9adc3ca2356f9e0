"""Builders of the LLVM code of products with codes: some rows of x times a piece of a panel, with the sums in
registers.

Within a piece, an element is one chain of fused multiply-adds of x and the numbers that codes stand for, in
the order of x's columns; where activations are rounded, it is a sum of integers, which is exact. The pieces'
sums, times their scales, are one chain. An element's bits therefore depend only on its row and weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import convert_bytes, convert_words, load_words
from tgis.shard.kernels.cpu.codes.layout import KINDS, PIECE, SCALES, UNIT, UNIT_BIT, VECTORS, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.int8.inner_loop import AVX512_VNNI, AVX_VNNI, HEADER, INSTRUCTION_SET
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I8, I32, I64

# Most rows of a tile: its sums, the words and numbers of a unit and the table fill the processor's registers.
# `many_rows.py` multiplies more.
ROWS = 5 if LANES == 16 else 2
# Bytes between rows of a piece of x: its columns, then their sum. No power of two, so that rows do not evict
# each other from the cache.
STRIDE = 4 * (PIECE + 16)
# Bytes between rows of a piece of rounded activations: a header, as int8 products have it, then its columns.
ROUNDED_STRIDE = HEADER + PIECE
_LINE = 64  # bytes of a cache line
HAS_VNNI = INSTRUCTION_SET in (AVX512_VNNI, AVX_VNNI) and INSTRUCTION_SET.lanes == LANES

_WORDS, _FLOATS = ir.VectorType(I32, LANES), ir.VectorType(FLOAT, LANES)


def load_zeros(b: Any, zeros: Any, v: int) -> Any:
    """Emit the load of zeros, int8, of vector v as float32."""
    kind = ir.VectorType(I8, LANES)
    return b.sitofp(b.load(llvm.pointer_to(b, kind, zeros, I64(LANES * v)), align=1), _FLOATS)


def _repeat(b: Any, x: Any) -> list[Any]:
    """Emit copies of an address, one for each vector of columns, that LLVM does not know to be equal.

    LLVM broadcasts a number of x that several products share to a register, which takes a vector instruction.
    AVX-512's products that load the number themselves broadcast it at no cost."""
    if LANES != 16:
        return [x] * VECTORS
    copy = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0", side_effect=True)
    return [b.call(copy, [x]) for _ in range(VECTORS)]


class _FloatSums:
    """Sums of float32 products."""

    initial, stride = llvm.constant(0.0, LANES), STRIDE

    def __init__(self, b: Any, kind: Kind, table: Any, x: Any):
        self._kind, self._table, self._x = kind, llvm.load_vector(b, table, LANES), _repeat(b, x)

    def add_unit(self, b: Any, sums: list[Any], x: list[Any], u: Any, unit: Any) -> list[Any]:
        """Emit the addition of the products of unit u. x: addresses of rows."""
        offset = b.mul(u, I64(4 * UNIT))
        columns, convert = (
            [b.add(address, offset) for address in self._x],
            load_unit(b, self._kind, unit, self._table),
        )
        for k in range(UNIT):
            numbers = convert(k)
            products = []
            for row in range(len(x)):
                places = [b.add(column, I64(STRIDE * row + 4 * k)) for column in columns]
                factors = [llvm.load_broadcast(b, place, LANES) for place in places]
                products += [b.fmul(*pair, **FUSED) for pair in zip(factors, numbers, strict=True)]
            sums = [b.fadd(*pair, **FUSED) for pair in zip(sums, products, strict=True)]
        return sums

    def subtract_zeros(self, b: Any, sums: list[Any], x: list[Any], zeros: Any) -> list[Any]:
        return subtract_products(b, sums, x, zeros)


def load_unit(b: Any, kind: Kind, unit: Any, table: Any) -> Callable[[int], list[Any]]:
    """Emit the loads of a unit whose activations are not rounded. Return what emits the numbers of one of its
    rows. table: the numbers that codes of 4 bits stand for."""
    if not kind.has_words:
        return partial(convert_bytes, b, unit)
    words = [word for [word] in load_words(b, unit, kind.bits)]
    return lambda k: convert_words(b, words, k, table)


def subtract_products(b: Any, sums: list[Any], x: list[Any], zeros: Any) -> list[Any]:
    """Emit sums - zeros * the sums of the rows of x, float32, unless `zeros`, the address of int8, is 0."""
    before, changed = b.block, []
    with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
        loaded = [load_zeros(b, zeros, v) for v in range(VECTORS)]
        for i, total in enumerate(sums):
            of_row = llvm.load_broadcast(b, b.add(x[i // VECTORS], I64(4 * PIECE)), LANES)
            changed.append(b.fsub(total, b.fmul(loaded[i % VECTORS], of_row, **FUSED), **FUSED))
        inside = b.block
    return [llvm.choose(b, before, old, inside, new) for old, new in zip(sums, changed, strict=True)]


class _RoundedSums:
    """Sums of integers by VNNI. Codes are unsigned bytes."""

    initial, stride = llvm.constant(0, LANES, I32), ROUNDED_STRIDE

    def __init__(self, b: Any, kind: Kind, table: Any, x: Any):
        self._bits, self._zero = kind.bits, llvm.constant(float(1 << (kind.bits - 1)), LANES)

    def add_unit(self, b: Any, sums: list[Any], x: list[Any], u: Any, unit: Any) -> list[Any]:
        weights = [take_bytes(b, words, self._bits) for words in load_words(b, unit, self._bits)]
        for i in range(2):
            quads = load_quads(b, x, u, i)
            cells = [(quad, each[i]) for quad in quads for each in weights]
            sums = [multiply_quads(b, total, *cell) for total, cell in zip(sums, cells, strict=True)]
        return sums

    def subtract_zeros(self, b: Any, sums: list[Any], x: list[Any], zeros: Any) -> list[Any]:
        """Emit sums - zeros * the sums of the rows, as float32, which is exact. The header has the row's sum
        times -128."""
        before = b.block
        with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
            changed = [b.fadd(self._zero, load_zeros(b, zeros, v)) for v in range(VECTORS)]
            inside = b.block
        found = [llvm.choose(b, before, self._zero, inside, each) for each in changed]
        factors = [b.fmul(each, llvm.constant(1 / 128, LANES)) for each in found]
        places = [llvm.pointer_to(b, I32, row, I64(4)) for row in x]
        of_rows = [b.sitofp(llvm.broadcast(b, b.load(place, align=4), LANES), _FLOATS) for place in places]
        exact = [b.sitofp(total, _FLOATS) for total in sums]
        return llvm.add_products(b, exact, of_rows, factors)


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


def multiply_quads(b: Any, total: Any, x: Any, weights: Any) -> Any:
    return llvm.call(b, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", _WORDS, total, weights, x)


@llvm_function()
def multiply_tile(
    b: Any,
    rows: Any,
    out: Any,
    x: Any,
    piece: Any,
    table: Any,
    zeros: Any,
    units: Any,
    is_first: Any,
    ahead: Any,
    element: Any,
) -> None:
    """Compute out[:rows, :COLUMNS] += x[:rows] @ a piece of a panel, `rows` being 1 to ROWS. If `is_first`,
    the result overwrites out. Rows of out are COLUMNS float32 apart, those of x STRIDE or ROUNDED_STRIDE
    bytes. `table` is the address of the numbers that codes of 4 bits stand for; `zeros` that of COLUMNS int8,
    or 0. The code prefetches as many units from the address `ahead` on."""
    end, kind = b.append_basic_block("end"), KINDS[element]
    cases, step = b.switch(rows, end), UNIT_BIT * kind.bits
    for num_rows in range(1, ROWS + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        kept = (_RoundedSums if kind.rounds_activations else _FloatSums)(b, kind, table, x)
        begins = [b.add(x, I64(kept.stride * r)) for r in range(num_rows)]
        scales = b.add(piece, b.mul(units, I64(step)))
        for line in range(0, SCALES, _LINE):
            llvm.prefetch(b, scales, I64(line))

        def add_unit(u: Any, sums: list[Any], kept: Any = kept, begins: Any = begins) -> list[Any]:
            offset = b.mul(u, I64(step))
            for line in range(0, step, _LINE):
                llvm.prefetch(b, b.add(ahead, offset), I64(line))
            added: list[Any] = kept.add_unit(b, sums, begins, u, b.add(piece, offset))
            return added

        sums = llvm.loop(b, units, [kept.initial] * (num_rows * VECTORS), add_unit)
        sums = kept.subtract_zeros(b, sums, begins, zeros)
        add_scaled(b, sums, begins if kind.rounds_activations else [], out, scales, is_first)
        b.branch(end)
    b.position_at_end(end)


def add_scaled(b: Any, sums: list[Any], headers: list[Any], out: Any, scales: Any, is_first: Any) -> None:
    """Emit out += sums * scales, or out = if it is the first piece. headers: addresses of the scales of rows,
    if these have scales."""
    loaded = [llvm.load_vector(b, b.add(scales, I64(4 * LANES * v)), LANES) for v in range(VECTORS)]
    is_cleared, zero = b.icmp_signed("!=", is_first, I64(0)), llvm.constant(0.0, LANES)
    of_rows = [llvm.load_broadcast(b, header, LANES) for header in headers]
    for i, total in enumerate(sums):
        place, scale = b.add(out, I64(4 * LANES * i)), loaded[i % VECTORS]
        if of_rows:
            scale = b.fmul(of_rows[i // VECTORS], scale)
        before = b.select(is_cleared, zero, llvm.load_vector(b, place, LANES))
        llvm.store_vector(b, b.fadd(before, b.fmul(total, scale, **FUSED), **FUSED), place)


@llvm_function()
def add_columns(b: Any, x: Any, units: Any) -> None:
    """Write the sum of units of a row of x behind its piece, in an order that is always the same."""

    def add_unit(u: Any, sums: list[Any]) -> list[Any]:
        loaded = llvm.load_vector(b, b.add(x, b.mul(u, I64(4 * UNIT))), UNIT)
        return [b.fadd(sums[0], loaded)]

    [total] = llvm.loop(b, units, [llvm.constant(0.0, UNIT)], add_unit)
    for half in (4, 2, 1):
        low = llvm.shuffle(b, total, total, list(range(half)))
        total = b.fadd(low, llvm.shuffle(b, total, total, list(range(half, 2 * half))))
    llvm.store_vector(b, total, b.add(x, I64(4 * PIECE)))
