"""Builders of the LLVM code of int8 products: tiles whose sums stay in registers, for each instruction set.
Integer sums are exact in any order, and floats are added group by group in one chain. So an element's bits
depend only on its row and column, and are the same with every instruction set."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I8, I16, I32, I64
from tgis.shard.quant.schemes.int8 import GROUP

QUAD = 4  # adjacent values that an instruction multiplies and adds
LINE = 64  # bytes of a cache line
HEADER = 8  # bytes before a group of activations: its scale (float32) and the correction of its sums (int32)


@dataclass(frozen=True)
class InstructionSet:
    lanes: int  # columns per vector
    vectors: int  # vectors per panel
    rows: tuple[int, ...]  # numbers of rows for which tiles are built, in descending order down to 1
    width: int  # bytes per activation
    sums: int  # accumulators per row and vector
    broadcast_quad: Callable[[Any, Any, int], Any]
    """Emits the load of a row's quad of activations and broadcasts it."""
    load_weights: Callable[[Any, Any, int], list[Any]]
    """Emits the load of a quad of weights for each lane."""
    multiply: Callable[[Any, list[Any], list[Any], Any, int], list[Any]]
    """Emits the addition of the products of weights and activations to the sums."""
    is_signed: bool = False
    """True if `load_weights` subtracts the offset of stored weights, so that sums need no correction."""

    @property
    def columns(self) -> int:
        """Columns per panel."""
        return self.lanes * self.vectors


def _load(b: Any, address: Any, element: Any, lanes: int = 1) -> Any:
    kind = element if lanes == 1 else ir.VectorType(element, lanes)
    return b.load(llvm.pointer_to(b, kind, address), align=1)


def _prefetch_lines(b: Any, address: Any, count: Any) -> None:
    def build(i: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch(b, address, b.mul(i, I64(LINE)))
        return []

    llvm.loop_range(b, I64(0), count, 1, [], build)


# VNNI: one instruction multiplies a quad of unsigned bytes by signed ones and sums the products.


def _broadcast_quad(b: Any, address: Any, lanes: int) -> Any:
    return llvm.broadcast(b, _load(b, address, I32), lanes)


def _load_weights_vnni(b: Any, address: Any, lanes: int) -> list[Any]:
    return [_load(b, address, I32, lanes)]


def _multiply_vnni(b: Any, sums: list[Any], w: list[Any], x: Any, lanes: int) -> list[Any]:
    return [llvm.call(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums[0].type, sums[0], w[0], x)]


# AVX2: pairs of 16-bit values, whose products and sums fit 32 bits. Each column has two adjacent sums.


def _broadcast_quad_avx2(b: Any, address: Any, lanes: int) -> Any:
    return b.bitcast(llvm.broadcast(b, _load(b, address, I64), 4), ir.VectorType(I16, 16))


def _load_weights_avx2(b: Any, address: Any, lanes: int) -> list[Any]:
    wide = ir.VectorType(I16, 16)
    return [b.zext(_load(b, b.add(address, I64(16 * i)), I8, 16), wide) for i in range(2)]


def _multiply_avx2(b: Any, sums: list[Any], w: list[Any], x: Any, lanes: int) -> list[Any]:
    products = [llvm.call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), half, x) for half in w]
    return [b.add(total, more) for total, more in zip(sums, products, strict=True)]


# ARM's dot product: one instruction multiplies quads of signed bytes and sums the products, in four lanes.


def add_signed_quads(b: Any, total: Any, x: Any, weights: Any) -> Any:
    """Emit total + the sums of products of quads of signed bytes, all int32 [8]."""
    halves = []
    for first in (0, 4):
        lanes = list(range(first, first + 4))
        sums, *quads = (llvm.shuffle(b, each, each, lanes) for each in (total, x, weights))
        values = [b.bitcast(each, ir.VectorType(I8, 16)) for each in quads]
        halves.append(llvm.call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, *values))
    return llvm.shuffle(b, halves[0], halves[1], list(range(8)))


def _load_weights_dot(b: Any, address: Any, lanes: int) -> list[Any]:
    # Inverting the upper bit subtracts 128.
    return [b.xor(_load(b, address, I32, lanes), llvm.constant(-0x7F7F7F80, lanes, I32))]


def _multiply_dot(b: Any, sums: list[Any], w: list[Any], x: Any, lanes: int) -> list[Any]:
    return [add_signed_quads(b, sums[0], x, w[0])]


# GENERIC: plain LLVM operations, without special instructions.


def _broadcast_quad_generic(b: Any, address: Any, lanes: int) -> Any:
    quad = b.sext(_load(b, address, I8, QUAD), ir.VectorType(I32, QUAD))
    return llvm.shuffle(b, quad, quad, list(range(QUAD)) * lanes)


def _load_weights_generic(b: Any, address: Any, lanes: int) -> list[Any]:
    return [b.zext(_load(b, address, I8, QUAD * lanes), ir.VectorType(I32, QUAD * lanes))]


def _multiply_generic(b: Any, sums: list[Any], w: list[Any], x: Any, lanes: int) -> list[Any]:
    products = b.mul(w[0], x)
    total = sums[0]
    for i in range(QUAD):
        total = b.add(total, llvm.shuffle(b, products, products, list(range(i, QUAD * lanes, QUAD))))
    return [total]


_VNNI = (1, 1, _broadcast_quad, _load_weights_vnni, _multiply_vnni)
_AVX2 = (2, 2, _broadcast_quad_avx2, _load_weights_avx2, _multiply_avx2)
_DOT = (1, 1, _broadcast_quad, _load_weights_dot, _multiply_dot)
_GENERIC = (1, 1, _broadcast_quad_generic, _load_weights_generic, _multiply_generic)
AVX512_VNNI = InstructionSet(16, 2, (8, 4, 2, 1), *_VNNI)
AVX_VNNI = InstructionSet(8, 2, (6, 4, 2, 1), *_VNNI)
AVX2 = InstructionSet(8, 1, (6, 4, 2, 1), *_AVX2)
ARM_DOT = InstructionSet(8, 2, (6, 4, 2, 1), *_DOT, is_signed=True)
GENERIC = InstructionSet(8, 1, (4, 3, 2, 1), *_GENERIC)


def _choose() -> InstructionSet:
    if all(llvm.has_feature(name) for name in ("avx512vnni", "avx512bw", "avx512vl")):
        return AVX512_VNNI
    if llvm.has_feature("avxvnni"):
        return AVX_VNNI
    if llvm.has_feature("dotprod"):
        return ARM_DOT
    return AVX2 if llvm.has_feature("avx2") else GENERIC


INSTRUCTION_SET = _choose()


@dataclass(frozen=True)
class _QuadTile:
    """Builder of the product of some rows of activations and a panel."""

    isa: InstructionSet
    num_rows: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(r, v) for r in range(self.num_rows) for v in range(self.isa.vectors)]

    def add_quads(self, b: Any, headers: list[Any], panel: Any, num_quads: Any) -> list[Any]:
        """Emit the corrected sums over a group, int32 [lanes] per cell. headers: addresses of the rows' group
        headers."""
        isa = self.isa
        x = [b.add(header, I64(HEADER)) for header in headers]
        corrections = [self._load_correction(b, header) for header in headers]
        flat = [corrections[r] for r, _ in self.cells for _ in range(isa.sums)]

        def build(k: Any, flat: list[Any]) -> list[Any]:
            at = b.add(panel, b.mul(k, I64(QUAD * isa.columns)))
            places = [b.add(at, I64(v * QUAD * isa.lanes)) for v in range(isa.vectors)]
            weights = [isa.load_weights(b, place, isa.lanes) for place in places]
            offset = b.mul(k, I64(QUAD * isa.width))
            quads = [isa.broadcast_quad(b, b.add(address, offset), isa.lanes) for address in x]
            changed = []
            for i, (r, v) in enumerate(self.cells):
                sums = flat[i * isa.sums : (i + 1) * isa.sums]
                changed += isa.multiply(b, sums, weights[v], quads[r], isa.lanes)
            return changed

        flat = llvm.loop(b, num_quads, flat, build)
        return [self._add_pairs(b, flat[i : i + isa.sums]) for i in range(0, len(flat), isa.sums)]

    def _load_correction(self, b: Any, header: Any) -> Any:
        """Emit the initial value of a row's accumulators. The first of a column's adjacent sums starts with
        the correction, the others with 0."""
        isa = self.isa
        if isa.is_signed:
            return llvm.constant(0, isa.lanes, I32)
        correction = b.zext(_load(b, b.add(header, I64(4)), I32), ir.IntType(32 * isa.sums))
        spread = llvm.broadcast(b, correction, isa.lanes // isa.sums)
        return b.bitcast(spread, ir.VectorType(I32, isa.lanes))

    def _add_pairs(self, b: Any, sums: list[Any]) -> Any:
        """Emit the sum of a column's adjacent sums."""
        if len(sums) == 1:
            return sums[0]
        even = list(range(0, 2 * self.isa.lanes, 2))
        odd = [lane + 1 for lane in even]
        first, second = sums
        return b.add(llvm.shuffle(b, first, second, even), llvm.shuffle(b, first, second, odd))

    def add_group(
        self, b: Any, totals: list[Any], headers: list[Any], panel: Any, num_quads: Any
    ) -> list[Any]:
        """Emit totals + scales * sums over a group."""
        isa = self.isa
        sums = self.add_quads(b, headers, panel, num_quads)
        scales_address = b.add(panel, b.mul(num_quads, I64(QUAD * isa.columns)))
        offsets = [I64(4 * isa.lanes * v) for v in range(isa.vectors)]
        scales = [_load(b, b.add(scales_address, offset), FLOAT, isa.lanes) for offset in offsets]
        rows = [llvm.broadcast(b, _load(b, header, FLOAT), isa.lanes) for header in headers]
        changed = []
        for total, exact, (r, v) in zip(totals, sums, self.cells, strict=True):
            value = b.sitofp(exact, scales[v].type)
            changed.append(b.fadd(total, b.fmul(value, b.fmul(rows[r], scales[v]), **FUSED), **FUSED))
        return changed

    def prefetch_out(self, b: Any, out: Any, stride: Any) -> None:
        """Emit prefetches of the memory that `store` writes, so that it arrives while sums are computed."""
        for r in range(self.num_rows):
            begin = b.add(out, b.mul(stride, I64(r)))
            for offset in range(0, 4 * self.isa.columns, LINE):
                llvm.prefetch_for_writing(b, begin, I64(offset))

    def store(self, b: Any, totals: list[Any], out: Any, stride: Any, num_columns: Any) -> None:
        """Emit the store of the first `num_columns` columns. Whole panels are stored without a mask, because
        masked stores are several times slower on some machines."""
        lanes = self.isa.lanes
        begins = [b.add(out, b.mul(stride, I64(r))) for r in range(self.num_rows)]
        places = [b.add(begins[r], I64(4 * lanes * v)) for r, v in self.cells]
        with b.if_else(b.icmp_signed(">=", num_columns, I64(self.isa.columns))) as (whole, part):
            with whole:
                for total, place in zip(totals, places, strict=True):
                    llvm.store_vector(b, total, place)
            with part:
                count = b.trunc(num_columns, I32)
                for total, place, (_, v) in zip(totals, places, self.cells, strict=True):
                    llvm.store_vector(
                        b, total, place, llvm.first_lanes(b, b.sub(count, I32(v * lanes)), lanes)
                    )


def make_tile(num_rows: int, isa: InstructionSet = INSTRUCTION_SET) -> Any:
    """Build a kernel function: out[:num_rows, :num_columns] = activations[:num_rows] @ a panel.

    Arguments: addresses of out and of activations, each with the bytes between rows; address of the panel;
    number of groups; number of quads in the last group; number of columns; `ahead` and `num_lines`, an
    address and the number of cache lines to prefetch per group. If there are any, the code also prefetches
    its part of out."""
    tile = _QuadTile(isa, num_rows)
    x_step = HEADER + GROUP * isa.width
    panel_step = (GROUP + 4) * isa.columns

    @llvm_function()
    def multiply(
        b: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        num_groups: Any,
        last_quads: Any,
        num_columns: Any,
        ahead: Any,
        num_lines: Any,
    ) -> None:
        headers = [b.add(x, b.mul(x_stride, I64(r))) for r in range(num_rows)]
        last = b.sub(num_groups, I64(1))
        with b.if_then(b.icmp_signed(">", num_lines, I64(0))):
            tile.prefetch_out(b, out, out_stride)

        def build(g: Any, totals: list[Any]) -> list[Any]:
            _prefetch_lines(b, b.add(ahead, b.mul(g, b.mul(num_lines, I64(LINE)))), num_lines)
            here = [b.add(header, b.mul(g, I64(x_step))) for header in headers]
            num_quads = b.select(b.icmp_signed("<", g, last), I64(GROUP // QUAD), last_quads)
            return tile.add_group(b, totals, here, b.add(panel, b.mul(g, I64(panel_step))), num_quads)

        totals = llvm.loop(b, num_groups, [llvm.constant(0.0, isa.lanes)] * len(tile.cells), build)
        tile.store(b, totals, out, out_stride, num_columns)

    return multiply
