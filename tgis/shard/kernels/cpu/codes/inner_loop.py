"""Builders of the LLVM code of products with codes: rows of x times a piece of a panel, with the sums in
registers.

Within a piece, an element is one chain of fused multiply-adds of x and the values of codes in the order of
x's columns or, with rounded activations, an exact sum of integers. Another chain adds the sums of pieces
times their scales, and the sums of x's columns times offsets. So an element's bits depend only on its row and
weights."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from llvmlite import ir

from tgis.shard.kernels.cpu.codes.conversion import emit_numbers, load_table
from tgis.shard.kernels.cpu.codes.integer_sums import (
    BYTES_STRIDE,
    CORRECTION,
    EXCESS,
    ROW_SUM,
    SCALE,
    add_units,
    count_block_units,
    is_centred,
)
from tgis.shard.kernels.cpu.codes.layout import KINDS, PIECE, UNIT, UNIT_BIT, VECTORS, Kind
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I8, I32, I64

# Maximum rows of a tile. Its sums, the words and numbers of a unit, and the table fill the registers.
ROWS = 5
# Bytes between rows of a piece of x: its columns, then their sum. Not a power of two, so that rows do not
# evict each other from the cache.
STRIDE = 4 * (PIECE + 16)
_LINE = 64  # bytes of a cache line

_FLOATS = ir.VectorType(FLOAT, LANES)


def load_zeros(b: Any, zeros: Any, v: int) -> Any:
    """Emit the load of zeros, int8, of vector v as float32."""
    kind = ir.VectorType(I8, LANES)
    return b.sitofp(b.load(llvm.pointer_to(b, kind, zeros, I64(LANES * v)), align=1), _FLOATS)


def _repeat(b: Any, x: Any, count: int) -> list[Any]:
    """Emit copies of an address, one per vector of columns, whose equality is hidden from LLVM.

    Otherwise LLVM would broadcast a number of x that several products share with a vector instruction.
    AVX-512's multiply-adds with a memory operand broadcast at no cost."""
    if LANES != 16:
        return [x] * count
    copy = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0", side_effect=True)
    return [b.call(copy, [x]) for _ in range(count)]


class Tile(Protocol):
    """Builder of the sums of rows of x and a strip of a panel."""

    initial: list[Any]
    block_units: int
    """Preferred number of units per call of `add_units`."""
    scales: list[Any]
    """Addresses of the scales of rows, if rows have scales."""

    def add_units(self, b: Any, sums: list[Any], u: Any, units: list[Any]) -> list[Any]:
        """Emit the addition of the products of units u, u + 1, ..., at the addresses `units`."""

    def finish(self, b: Any, sums: list[Any], zeros: Any) -> list[Any]:
        """Emit sums - zeros * row sums, as float32. The address `zeros` may be 0."""

    def load_row_sums(self, b: Any) -> list[Any]:
        """Emit the loads of the rows' scaled sums, broadcast to all lanes."""


class _FloatSums:
    """Sums of float32 products."""

    block_units = 1

    def __init__(self, b: Any, kind: Kind, table: Any, rows: list[Any], num_vectors: int):
        self._kind = kind
        self._table = load_table(b, kind, table)
        self._num_vectors = num_vectors
        self._rows = rows
        self._x = _repeat(b, rows[0], num_vectors)
        self.scales = list[Any]()
        self.initial = [llvm.constant(0.0, LANES)] * (len(rows) * num_vectors)

    def add_units(self, b: Any, sums: list[Any], u: Any, units: list[Any]) -> list[Any]:
        [unit] = units
        offset = b.mul(u, I64(4 * UNIT))
        columns = [b.add(address, offset) for address in self._x]
        changed = list(sums)
        for k, first, numbers in emit_numbers(b, self._kind, unit, self._table, self._num_vectors):
            for row in range(len(self._rows)):
                places = [b.add(column, I64(STRIDE * row + 4 * k)) for column in columns[: len(numbers)]]
                factors = [llvm.load_broadcast(b, place, LANES) for place in places]
                begin = row * self._num_vectors + first
                old = changed[begin : begin + len(numbers)]
                products = [b.fmul(*pair, **FUSED) for pair in zip(factors, numbers, strict=True)]
                changed[begin : begin + len(numbers)] = [
                    b.fadd(*pair, **FUSED) for pair in zip(old, products, strict=True)
                ]
        return changed

    def finish(self, b: Any, sums: list[Any], zeros: Any) -> list[Any]:
        return subtract_products(b, sums, self._rows, zeros)

    def load_row_sums(self, b: Any) -> list[Any]:
        return load_float_sums(b, self._rows)


def load_float_sums(b: Any, x: list[Any]) -> list[Any]:
    """Emit the loads of the sums that follow the pieces of float32 rows."""
    return [llvm.load_broadcast(b, b.add(row, I64(4 * PIECE)), LANES) for row in x]


def subtract_products(b: Any, sums: list[Any], x: list[Any], zeros: Any) -> list[Any]:
    """Emit sums - zeros * row sums of float32 x. If the address `zeros` is 0, return the sums."""
    before = b.block
    changed = []
    num_vectors = len(sums) // len(x)
    with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
        loaded = [load_zeros(b, zeros, v) for v in range(num_vectors)]
        for i, total in enumerate(sums):
            row_sum = llvm.load_broadcast(b, b.add(x[i // num_vectors], I64(4 * PIECE)), LANES)
            changed.append(b.fsub(total, b.fmul(loaded[i % num_vectors], row_sum, **FUSED), **FUSED))
        inside = b.block
    return [llvm.choose(b, before, old, inside, new) for old, new in zip(sums, changed, strict=True)]


class RoundedSums:
    """Sums of integers. They start with the negative of the excess that unsigned codes cause."""

    def __init__(self, b: Any, kind: Kind, stored_bits: int, rows: list[Any], num_vectors: int):
        """Emit the initial sums for rows of x at addresses. Codes occupy `stored_bits` bits."""
        self._kind = kind
        self._stored_bits = stored_bits
        self._num_vectors = num_vectors
        self._rows = rows
        self.scales = [b.add(row, I64(SCALE)) for row in rows]
        self.block_units = count_block_units(kind, stored_bits)
        if is_centred(kind, stored_bits):
            self.initial = [llvm.constant(0, LANES, I32)] * (len(rows) * num_vectors)
        else:
            excess = [self._load_integer(b, row, EXCESS) for row in rows]
            self.initial = [each for each in excess for _ in range(num_vectors)]

    def add_units(self, b: Any, sums: list[Any], u: Any, units: list[Any]) -> list[Any]:
        return add_units(b, sums, self._rows, u, units, self._stored_bits, self._kind)

    def finish(self, b: Any, sums: list[Any], zeros: Any) -> list[Any]:
        exact = [b.sitofp(total, _FLOATS) for total in sums]
        before = b.block
        with b.if_then(b.icmp_signed("!=", zeros, I64(0))):
            loaded = [load_zeros(b, zeros, v) for v in range(self._num_vectors)]
            factors = [b.fmul(each, llvm.constant(1 / 128, LANES)) for each in loaded]
            row_sums = [b.sitofp(self._load_integer(b, row, CORRECTION), _FLOATS) for row in self._rows]
            changed = llvm.add_products(b, exact, row_sums, factors)
            inside = b.block
        return [llvm.choose(b, before, old, inside, new) for old, new in zip(exact, changed, strict=True)]

    def load_row_sums(self, b: Any) -> list[Any]:
        return [llvm.load_broadcast(b, b.add(row, I64(ROW_SUM)), LANES) for row in self._rows]

    def _load_integer(self, b: Any, row: Any, offset: int) -> Any:
        return llvm.broadcast(b, b.load(llvm.pointer_to(b, I32, row, I64(offset)), align=4), LANES)


@llvm_function()
def multiply_tile(
    b: Any,
    rows: Any,
    out: Any,
    x: Any,
    piece: Any,
    table: Any,
    scales: Any,
    offsets: Any,
    zeros: Any,
    units: Any,
    ahead: Any,
    element: Any,
) -> None:
    """Compute out[:rows, :COLUMNS] += x[:rows] @ a piece of a panel.

    rows: 1 to ROWS. Rows of out are COLUMNS float32 apart, rows of x STRIDE or BYTES_STRIDE bytes. table:
    address of the values of 4-bit codes. scales, offsets: addresses of float32 [COLUMNS]. zeros: address of
    int8 [COLUMNS]. offsets and zeros may be 0. The code prefetches the same number of units at the address
    `ahead`."""
    kind = KINDS[element]
    if kind.rounds_activations and kind.is_packed:
        return  # packed codes are always widened
    end = b.append_basic_block("end")
    stride = BYTES_STRIDE if kind.rounds_activations else STRIDE
    cases = b.switch(rows, end)
    width = kind.column_bytes
    for num_rows in range(1, ROWS + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        begins = [b.add(x, I64(stride * r)) for r in range(num_rows)]
        tile = partial(_multiply_strip, b, kind, table, begins, units, ahead)
        multiply_strips(
            b, _count_strips(kind, num_rows), Strip(out, piece, scales, offsets, zeros), tile, width
        )
        b.branch(end)
    b.position_at_end(end)


def _count_strips(kind: Kind, num_rows: int) -> int:
    """Return the number of strips into which a tile splits a panel. Without AVX-512 there are only 16
    registers."""
    return 2 if LANES != 16 and num_rows > (1 if kind.has_any_numbers else 2) else 1


class Strip(NamedTuple):
    """Adjacent vectors of a panel's columns whose sums fit the registers. Fields are addresses."""

    out: Any
    codes: Any
    scales: Any
    offsets: Any
    zeros: Any
    num_vectors: int = VECTORS
    index: Any = I64(0)


def multiply_strips(
    b: Any, count: int, panel: Strip, multiply: Callable[[Strip], None], code_bytes: int
) -> None:
    """Emit `multiply` for each of `count` strips of a panel. Codes of adjacent columns are `code_bytes` bytes
    apart."""
    if count == 1:
        multiply(panel)
        return
    width = LANES * VECTORS // count

    def multiply_one(s: Any, _: list[Any]) -> list[Any]:
        vectors = b.mul(s, I64(4 * width))
        own = b.add(panel.zeros, b.mul(s, I64(width)))
        out, scales = (b.add(address, vectors) for address in (panel.out, panel.scales))
        codes = b.add(panel.codes, b.mul(s, I64(code_bytes * width)))
        zeros = b.select(b.icmp_signed("!=", panel.zeros, I64(0)), own, I64(0))
        has_offsets = b.icmp_signed("!=", panel.offsets, I64(0))
        offsets = b.select(has_offsets, b.add(panel.offsets, vectors), I64(0))
        multiply(Strip(out, codes, scales, offsets, zeros, VECTORS // count, s))
        return []

    llvm.loop(b, I64(count), [], multiply_one)


def _multiply_strip(
    b: Any, kind: Kind, table: Any, rows: list[Any], units: Any, ahead: Any, strip: Strip
) -> None:
    """Emit the product of rows of x and a strip, and prefetches of the strip's share of the memory at
    `ahead`."""
    step = UNIT_BIT * kind.bits
    if kind.rounds_activations:
        tile: Tile = RoundedSums(b, kind, kind.bits, rows, strip.num_vectors)
    else:
        tile = _FloatSums(b, kind, table, rows, strip.num_vectors)
    part = step * strip.num_vectors // VECTORS
    begin = b.add(ahead, b.mul(strip.index, I64(part)))

    def add_units(u: Any, count: int, sums: list[Any]) -> list[Any]:
        offsets = [b.mul(b.add(u, I64(i)), I64(step)) for i in range(count)]
        for offset in offsets:
            for line in range(0, part, _LINE):
                llvm.prefetch(b, b.add(begin, offset), I64(line))
        return tile.add_units(b, sums, u, [b.add(strip.codes, offset) for offset in offsets])

    sums = loop_units(b, tile, units, add_units)
    add_scaled(b, tile, tile.finish(b, sums, strip.zeros), strip)


def loop_units(
    b: Any, tile: Tile, units: Any, build: Callable[[Any, int, list[Any]], list[Any]]
) -> list[Any]:
    """Emit the addition of units to a tile's sums, in blocks of the tile's preferred size. `build` gets the
    number of the first unit and the count."""
    block, sums = tile.block_units, tile.initial
    if block == 1:
        return llvm.loop(b, units, sums, lambda u, sums: build(u, 1, sums))
    whole = b.and_(units, I64(-block))
    sums = llvm.loop_range(b, I64(0), whole, block, sums, lambda u, sums: build(u, block, sums))
    return llvm.loop_range(b, whole, units, 1, sums, lambda u, sums: build(u, 1, sums))


def add_scaled(b: Any, tile: Tile, sums: list[Any], strip: Strip) -> None:
    """Emit out += row sums * offsets, if there are offsets, then out += sums * scales."""
    with b.if_else(b.icmp_signed("!=", strip.offsets, I64(0))) as (has_offsets, has_none):
        with has_offsets:
            _add_products(b, tile, sums, strip, tile.load_row_sums(b))
        with has_none:
            _add_products(b, tile, sums, strip, None)


def _add_products(b: Any, tile: Tile, sums: list[Any], strip: Strip, row_sums: list[Any] | None) -> None:
    """Emit the additions of `add_scaled`. `row_sums` is None without offsets."""
    places = [I64(4 * LANES * v) for v in range(strip.num_vectors)]
    scales = [llvm.load_vector(b, b.add(strip.scales, place), LANES) for place in places]
    if row_sums is not None:
        offsets = [llvm.load_vector(b, b.add(strip.offsets, place), LANES) for place in places]
    for i, total in enumerate(sums):
        r, v = divmod(i, strip.num_vectors)
        at = b.add(strip.out, I64(4 * LANES * (r * VECTORS + v)))
        before = llvm.load_vector(b, at, LANES)
        scale = scales[v]
        if row_sums is not None:
            before = llvm.multiply_add(b, row_sums[r], offsets[v], before)
        if tile.scales:
            scale = b.fmul(llvm.load_broadcast(b, tile.scales[r], LANES), scale)
        llvm.store_vector(b, llvm.multiply_add(b, total, scale, before), at)


@llvm_function()
def prefetch_lines(b: Any, at: Any, num_bytes: Any) -> None:
    """Prefetch `num_bytes` bytes at an address."""

    def prefetch(begin: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch(b, at, begin)
        return []

    llvm.loop_range(b, I64(0), num_bytes, _LINE, [], prefetch)


@llvm_function()
def add_columns(b: Any, x: Any, units: Any) -> None:
    """Write the sum of a piece of a row of x after the piece. The order of additions is fixed."""

    def add_unit(u: Any, sums: list[Any]) -> list[Any]:
        loaded = llvm.load_vector(b, b.add(x, b.mul(u, I64(4 * UNIT))), UNIT)
        return [b.fadd(sums[0], loaded)]

    [total] = llvm.loop(b, units, [llvm.constant(0.0, UNIT)], add_unit)
    for half in (4, 2, 1):
        low = llvm.shuffle(b, total, total, list(range(half)))
        total = b.fadd(low, llvm.shuffle(b, total, total, list(range(half, 2 * half))))
    llvm.store_vector(b, total, b.add(x, I64(4 * PIECE)))
