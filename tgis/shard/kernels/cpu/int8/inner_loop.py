"""Builders of the LLVM code of int8 products: tiles whose sums stay in registers, for each instruction set.

Integer sums are exact in any order, and floats are added group after group in one chain. An element's bits
therefore depend only on its own row and column, and are the same with every instruction set."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.gemm.panels import has_feature
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I8, I16, I32, I64, everywhere, loop

GROUP = 128  # adjacent values of a row, of weights or activations, that share a scale
QUAD = 4  # adjacent values that an instruction multiplies at once
HEAD = 8  # bytes before a group of activations: its scale, float32, and the correction of its sums, int32


@dataclass(frozen=True)
class Form:
    """Computation of tiles with one instruction set."""

    lanes: int  # columns of a vector
    vectors: int  # vectors of a panel
    rows: tuple[int, ...]  # numbers of rows that tiles are built for, tallest first; the last is 1
    width: int  # bytes of an activation
    sums: int  # accumulators for each row and vector
    spread: Callable[["Form", Any, Any], list[Any]]
    weights: Callable[["Form", Any, Any], list[Any]]
    multiply: Callable[["Form", Any, list[Any], list[Any], list[Any]], list[Any]]

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return self.lanes * self.vectors


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _take_lanes(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(_vector(I32, len(lanes)), lanes))


def _call(b: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, args)


def _load(b: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


# BYTES: one instruction multiplies a quad of unsigned bytes with a quad of signed ones and adds the products
# up.


def _spread_bytes(form: Form, b: Any, address: Any) -> list[Any]:
    return [everywhere(b, _load(b, address, I32), form.lanes)]


def _load_bytes(form: Form, b: Any, address: Any) -> list[Any]:
    return [_load(b, address, _vector(I32, form.lanes))]


def _multiply_bytes(form: Form, b: Any, sums: list[Any], w: list[Any], x: list[Any]) -> list[Any]:
    kind = _vector(I32, form.lanes)
    return [_call(b, f"llvm.x86.avx512.vpdpbusd.{32 * form.lanes}", kind, sums[0], w[0], x[0])]


# PAIRS: pairs of 16-bit values, whose products and sums cannot overflow 32 bits. A column has two adjacent
# sums.


def _spread_pairs(form: Form, b: Any, address: Any) -> list[Any]:
    return [b.bitcast(everywhere(b, _load(b, address, I64), 4), _vector(I16, 16))]


def _load_pairs(form: Form, b: Any, address: Any) -> list[Any]:
    half, wide = _vector(I8, 16), _vector(I16, 16)
    return [b.zext(_load(b, b.add(address, I64(16 * i)), half), wide) for i in range(2)]


def _multiply_pairs(form: Form, b: Any, sums: list[Any], w: list[Any], x: list[Any]) -> list[Any]:
    products = [_call(b, "llvm.x86.avx2.pmadd.wd", _vector(I32, 8), half, x[0]) for half in w]
    return [b.add(total, more) for total, more in zip(sums, products, strict=True)]


# ANY: plain LLVM operations, without special instructions.


def _spread_any(form: Form, b: Any, address: Any) -> list[Any]:
    quad = b.sext(_load(b, address, _vector(I8, QUAD)), _vector(I32, QUAD))
    return [_take_lanes(b, quad, quad, list(range(QUAD)) * form.lanes)]


def _load_any(form: Form, b: Any, address: Any) -> list[Any]:
    lanes = QUAD * form.lanes
    return [b.zext(_load(b, address, _vector(I8, lanes)), _vector(I32, lanes))]


def _multiply_any(form: Form, b: Any, sums: list[Any], w: list[Any], x: list[Any]) -> list[Any]:
    products, total = b.mul(w[0], x[0]), sums[0]
    for i in range(QUAD):
        total = b.add(total, _take_lanes(b, products, products, list(range(i, QUAD * form.lanes, QUAD))))
    return [total]


_BYTES = (1, 1, _spread_bytes, _load_bytes, _multiply_bytes)
_PAIRS = (2, 2, _spread_pairs, _load_pairs, _multiply_pairs)
WIDE_BYTES = Form(16, 2, (8, 4, 2, 1), *_BYTES)
BYTES = Form(8, 2, (6, 4, 2, 1), *_BYTES)
PAIRS = Form(8, 1, (6, 4, 2, 1), *_PAIRS)
ANY = Form(8, 1, (4, 3, 2, 1), 1, 1, _spread_any, _load_any, _multiply_any)


def _choose() -> Form:
    if all(has_feature(name) for name in ("avx512vnni", "avx512bw", "avx512vl")):
        return WIDE_BYTES
    if has_feature("avxvnni"):
        return BYTES
    return PAIRS if has_feature("avx2") else ANY


FORM = _choose()


@dataclass(frozen=True)
class _Tile:
    """Builder of the product of some rows of activations and a panel."""

    form: Form
    num_rows: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(r, v) for r in range(self.num_rows) for v in range(self.form.vectors)]

    def add_quads(self, b: Any, x: list[Any], panel: Any, num_quads: Any) -> list[Any]:
        """Emit the sums over a group, [lanes] of int32 for every cell. x: addresses of the rows' group."""
        form = self.form
        flat = [ir.Constant(_vector(I32, form.lanes), [0] * form.lanes)] * (form.sums * len(self.cells))

        def build(k: Any, flat: list[Any]) -> list[Any]:
            at = b.add(panel, b.mul(k, I64(QUAD * form.columns)))
            places = [b.add(at, I64(v * QUAD * form.lanes)) for v in range(form.vectors)]
            weights = [form.weights(form, b, place) for place in places]
            place = b.mul(k, I64(QUAD * form.width))
            spread = [form.spread(form, b, b.add(address, place)) for address in x]
            changed = []
            for i, (r, v) in enumerate(self.cells):
                sums = flat[i * form.sums : (i + 1) * form.sums]
                changed += form.multiply(form, b, sums, weights[v], spread[r])
            return changed

        flat = loop(b, num_quads, flat, build)
        return [self._join(b, flat[i : i + form.sums]) for i in range(0, len(flat), form.sums)]

    def _join(self, b: Any, sums: list[Any]) -> Any:
        if len(sums) == 1:
            return sums[0]
        one, other = sums
        lanes = list(range(0, 2 * self.form.lanes, 2))
        odd = [lane + 1 for lane in lanes]
        return b.add(_take_lanes(b, one, other, lanes), _take_lanes(b, one, other, odd))

    def add_group(self, b: Any, totals: list[Any], heads: list[Any], panel: Any, num_quads: Any) -> list[Any]:
        """Emit totals + sums over a group times the scales. heads: addresses of the rows' group heads."""
        form = self.form
        sums = self.add_quads(b, [b.add(head, I64(HEAD)) for head in heads], panel, num_quads)
        behind = b.add(panel, b.mul(num_quads, I64(QUAD * form.columns)))
        kind = _vector(FLOAT, form.lanes)
        scales = [_load(b, b.add(behind, I64(4 * form.lanes * v)), kind) for v in range(form.vectors)]
        rows = [everywhere(b, _load(b, head, FLOAT), form.lanes) for head in heads]
        missing = [everywhere(b, _load(b, b.add(head, I64(4)), I32), form.lanes) for head in heads]
        changed = []
        for total, exact, (r, v) in zip(totals, sums, self.cells, strict=True):
            value = b.sitofp(b.add(exact, missing[r]), kind)
            changed.append(b.fadd(total, b.fmul(value, b.fmul(rows[r], scales[v]), **FUSED), **FUSED))
        return changed

    def store(self, b: Any, totals: list[Any], out: Any, stride: Any, num_columns: Any) -> None:
        """Emit the store of the first `num_columns` columns.

        A whole panel is stored without a mask, because masked stores take many times as long on some
        machines."""
        begins = [b.add(out, b.mul(stride, I64(r))) for r in range(self.num_rows)]
        kind = _vector(FLOAT, self.form.lanes)
        addresses = [b.add(begins[r], I64(4 * self.form.lanes * v)) for r, v in self.cells]
        places = [b.inttoptr(address, kind.as_pointer()) for address in addresses]
        with b.if_else(b.icmp_signed(">=", num_columns, I64(self.form.columns))) as (whole, part):
            with whole:
                for total, place in zip(totals, places, strict=True):
                    b.store(total, place, align=4)
            with part:
                self._store_some(b, totals, places, b.trunc(num_columns, I32))

    def _store_some(self, b: Any, totals: list[Any], places: list[Any], num_columns: Any) -> None:
        lanes = self.form.lanes
        numbers = ir.Constant(_vector(I32, lanes), list(range(lanes)))
        for total, place, (_, v) in zip(totals, places, self.cells, strict=True):
            left = everywhere(b, b.sub(num_columns, I32(v * lanes)), lanes)
            mask = b.icmp_signed("<", numbers, left)
            _call(b, f"llvm.masked.store.v{lanes}f32.p0", ir.VoidType(), total, place, I32(4), mask)


def make_tile(num_rows: int, form: Form = FORM) -> Any:
    """Build a function for kernels that computes out[:num_rows, :num_columns] = activations[:num_rows] @ a
    panel.

    Its arguments: the addresses of out and of activations, each followed by the bytes from one row to the
    next; the panel's address; the number of groups; the number of quads in the last group; the number of
    columns, at most the panel's."""
    tile = _Tile(form, num_rows)
    num_full = GROUP // QUAD
    x_step, panel_step = HEAD + GROUP * form.width, (GROUP + 4) * form.columns

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, out_stride, x, x_stride, panel, num_groups, last_quads, num_columns = args
        heads = [b.add(x, b.mul(x_stride, I64(r))) for r in range(num_rows)]
        zero = ir.Constant(_vector(FLOAT, form.lanes), [0.0] * form.lanes)
        last = b.sub(num_groups, I64(1))

        def build(g: Any, totals: list[Any]) -> list[Any]:
            here = [b.add(head, b.mul(g, I64(x_step))) for head in heads]
            num_quads = b.select(b.icmp_signed("<", g, last), I64(num_full), last_quads)
            return tile.add_group(b, totals, here, b.add(panel, b.mul(g, I64(panel_step))), num_quads)

        totals = loop(b, num_groups, [zero] * len(tile.cells), build)
        tile.store(b, totals, out, out_stride, num_columns)
        return context.get_dummy_value()

    i = types.int64

    def multiply(
        typingctx: Any, out: Any, os: Any, x: Any, xs: Any, panel: Any, groups: Any, last: Any, columns: Any
    ) -> Any:
        return types.void(*[i] * 8), generate

    return intrinsic(multiply)
