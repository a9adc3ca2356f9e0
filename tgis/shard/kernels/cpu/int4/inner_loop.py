"""Builders of the LLVM code of products with codes. Within a piece, an element is one chain of fused
multiply-adds of x and numbers that codes stand for, in the order of x's columns; the pieces' sums, times
their scales, are one chain too. An element's bits therefore depend only on its own row and weights."""

from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.int4.layout import BITS, COLUMNS, PIECE, UNIT, UNIT_BIT, VECTORS
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I8, I32, I64

# Most rows of a tile: its sums, the words and numbers of a unit and the table fill the processor's registers.
ROWS = 5 if LANES == 16 else 2
# Bytes between rows of a piece of x: its columns, then their sum. No power of two, so that rows do not evict
# each other from the cache.
STRIDE = 4 * (PIECE + 16)

_WORDS = ir.VectorType(I32, LANES)


def _load_words(b: Any, unit: Any, element: Any) -> list[list[Any]]:
    """Emit the loads of a unit from an address: for each vector of columns, its words."""
    words = range(BITS[element] * UNIT // 32)
    offsets = [[4 * (i * COLUMNS + v * LANES) for i in words] for v in range(VECTORS)]
    return [[_load(b, unit, offset) for offset in each] for each in offsets]


def _load(b: Any, unit: Any, offset: int) -> Any:
    return b.load(llvm.pointer_to(b, _WORDS, unit, I64(offset)), align=4 * LANES)


def _convert(b: Any, words: list[Any], k: int, table: Any, element: Any) -> Any:
    """Emit the float32 numbers that codes k of words stand for."""
    floats = ir.VectorType(FLOAT, LANES)
    if BITS[element] == 8:
        high = b.shl(words[k // 4], llvm.constant(24 - 8 * (k % 4), LANES, I32))
        return b.sitofp(b.ashr(high, llvm.constant(24, LANES, I32)), floats)
    index = b.lshr(words[0], llvm.constant(8 * (k % 4) + 4 * (k // 4), LANES, I32))
    if LANES == 16:  # the instruction ignores the upper bits of indices
        return llvm.call(b, "llvm.x86.avx512.permvar.sf.512", floats, table, index)
    number = b.sitofp(b.and_(index, llvm.constant(15, LANES, I32)), floats)
    return b.fadd(number, llvm.constant(-8.0, LANES))


def _multiply_unit(
    b: Any, sums: list[Any], columns: list[Any], unit: Any, table: Any, element: Any
) -> list[Any]:
    """Emit the addition of a unit's products. columns: addresses of the rows' first columns."""
    words = _load_words(b, unit, element)
    for k in range(UNIT):
        numbers = [_convert(b, words[v], k, table, element) for v in range(VECTORS)]
        factors = [llvm.load_broadcast(b, b.add(column, I64(4 * k)), LANES) for column in columns]
        sums = llvm.add_products(b, sums, factors, numbers)
    return sums


def _subtract_zeros(b: Any, sums: list[Any], x: list[Any], zeros: Any) -> list[Any]:
    """Emit sums - zeros * the sums of the rows of x, unless `zeros`, the address of int8, is 0."""
    before = b.block
    with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
        changed, kind = [], ir.VectorType(I8, LANES)
        for row, address in enumerate(x):
            total = llvm.load_broadcast(b, b.add(address, I64(4 * PIECE)), LANES)
            for v in range(VECTORS):
                stored = b.load(llvm.pointer_to(b, kind, zeros, I64(LANES * v)), align=1)
                product = b.fmul(b.sitofp(stored, total.type), total, **FUSED)
                changed.append(b.fsub(sums[row * VECTORS + v], product, **FUSED))
        inside = b.block
    return [llvm.choose(b, before, old, inside, new) for old, new in zip(sums, changed, strict=True)]


def _add_piece(
    b: Any, sums: list[Any], rows: tuple[list[Any], list[Any]], scales: Any, zeros: Any, is_first: Any
) -> None:
    """Emit out += (sums - zeros) * scales, or out = if it is the first piece. rows: addresses of rows of out
    and of x."""
    out, x = rows
    sums = _subtract_zeros(b, sums, x, zeros)
    loaded = [llvm.load_vector(b, b.add(scales, I64(4 * LANES * v)), LANES) for v in range(VECTORS)]
    is_cleared, zero = b.icmp_signed("!=", is_first, I64(0)), llvm.constant(0.0, LANES)
    for i, total in enumerate(sums):
        place = b.add(out[i // VECTORS], I64(4 * LANES * (i % VECTORS)))
        before = b.select(is_cleared, zero, llvm.load_vector(b, place, LANES))
        product = b.fmul(total, loaded[i % VECTORS], **FUSED)
        llvm.store_vector(b, b.fadd(before, product, **FUSED), place)


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
    element: Any,
) -> None:
    """Compute out[:rows, :COLUMNS] += x[:rows] @ a piece of a panel, `rows` being 1 to ROWS. If `is_first`,
    the result overwrites out. Rows of out are COLUMNS float32, rows of x STRIDE bytes apart. `table` is the
    address of the numbers that codes of 4 bits stand for; `zeros` that of COLUMNS int8, or 0."""
    end = b.append_basic_block("end")
    cases, step = b.switch(rows, end), UNIT_BIT * BITS[element]
    for num_rows in range(1, ROWS + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        numbers, cleared = (
            llvm.load_vector(b, table, LANES),
            [llvm.constant(0.0, LANES)] * (num_rows * VECTORS),
        )
        begins = [b.add(x, I64(STRIDE * r)) for r in range(num_rows)]

        def add_unit(u: Any, sums: list[Any], begins: Any = begins, numbers: Any = numbers) -> list[Any]:
            offset = b.mul(u, I64(4 * UNIT))
            columns = [b.add(begin, offset) for begin in begins]
            unit = b.add(piece, b.mul(u, I64(step)))
            return _multiply_unit(b, sums, columns, unit, numbers, element)

        sums = llvm.loop(b, units, cleared, add_unit)
        places = [b.add(out, I64(4 * COLUMNS * r)) for r in range(num_rows)]
        _add_piece(b, sums, (places, begins), b.add(piece, b.mul(units, I64(step))), zeros, is_first)
        b.branch(end)
    b.position_at_end(end)


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
