"""The one kernel that is vectorised by hand: a small matrix product that keeps its sums in registers.

LLVM cannot prove that numba's arrays do not overlap and so reloads every sum; this says it outright. Each
sum is one chain of fused multiply-adds along `n`, so its bits depend on its own row and column alone."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.cache import LANES
from tgis.shard.compiled import inner, intrinsic

ROWS = 4  # rows that the taller products take at once

_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_STORED = {types.float32: _FLOAT, types.uint16: ir.IntType(16), types.int16: ir.HalfType()}
_FUSED = {"flags": ("contract",)}


def _at(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Pointer to an `element`, `offset` bytes behind the address `base`."""
    return b.inttoptr(b.add(base, offset), element.as_pointer())


def _load_vector(b: Any, base: Any, offset: Any, dtype: Any) -> Any:
    """Stored elements as float32; uint16 holds bfloat16 bits, int16 float16 bits."""
    x = b.load(_at(b, base, offset, ir.VectorType(_STORED[dtype], LANES)), align=2)
    if dtype == types.int16:
        return b.fpext(x, _VECTOR)
    if dtype == types.uint16:
        wide = ir.VectorType(_I32, LANES)
        return b.bitcast(b.shl(b.zext(x, wide), ir.Constant(wide, [16] * LANES)), _VECTOR)
    return x


def _load_everywhere(b: Any, base: Any, offset: Any) -> Any:
    """One float32 in all lanes."""
    x = b.load(_at(b, base, offset, _FLOAT), align=4)
    first = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, _I32(0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _loop(b: Any, n: Any, initial: list[Any], build: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """values = initial; for k in range(n): values = build(k, values); n is at least 1."""
    before, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k, values = b.phi(_I64), [b.phi(_VECTOR) for _ in initial]
    changed = build(k, values)
    following = b.add(k, _I64(1))
    for phi, first, next_ in zip([k, *values], [_I64(0), *initial], [following, *changed], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_, loop)
    b.cbranch(b.icmp_signed("<", following, n), loop, done)
    b.position_at_end(done)
    return changed


def _product(num_rows: int, num_vectors: int, adds: bool) -> Any:
    """out[:num_rows, : num_vectors * LANES] (+)= factors[:num_rows, :n] @ matrix[:n, : num_vectors * LANES].

    Arguments: the addresses of out and factors, both float32, and of matrix, each followed by the bytes
    from one row to the next; n, at least 1; and a value of the matrix' type."""
    cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, out_stride, factors, factor_stride, matrix, matrix_stride, n, _ = args
        dtype = signature.args[-1]
        width = dtype.bitwidth // 8 * LANES
        places = [
            _at(b, out, b.add(b.mul(_I64(r), out_stride), _I64(4 * LANES * v)), _VECTOR) for r, v in cells
        ]
        initial = [b.load(p, align=4) if adds else ir.Constant(_VECTOR, [0.0] * LANES) for p in places]

        def build(k: Any, sums: list[Any]) -> list[Any]:
            row, column = b.mul(k, matrix_stride), b.mul(k, _I64(4))
            loaded = [_load_vector(b, matrix, b.add(row, _I64(v * width)), dtype) for v in range(num_vectors)]
            offsets = [b.add(b.mul(_I64(r), factor_stride), column) for r in range(num_rows)]
            spread = [_load_everywhere(b, factors, offset) for offset in offsets]
            products = [b.fmul(spread[r], loaded[v], **_FUSED) for r, v in cells]
            return [b.fadd(total, more, **_FUSED) for total, more in zip(sums, products, strict=True)]

        for place, total in zip(places, _loop(b, n, initial, build), strict=True):
            b.store(total, place, align=4)
        return context.get_dummy_value()

    i = types.int64

    def product(
        typingctx: Any, out: Any, os: Any, factors: Any, fs: Any, matrix: Any, ms: Any, n: Any, element: Any
    ) -> Any:
        return types.void(i, i, i, i, i, i, i, element), generate

    return intrinsic(product)


_set_4x2, _set_4x1, _set_1x2, _set_1x1 = (_product(r, v, False) for r in (ROWS, 1) for v in (2, 1))
_add_4x2, _add_4x1, _add_1x2, _add_1x1 = (_product(r, v, True) for r in (ROWS, 1) for v in (2, 1))


@inner
def multiply_keys(scores: int, stride: int, q: int, rows: int, p: Any, page: int, element: Any) -> None:
    """scores[rows, columns] = q[rows, head_dim] @ page of keys."""
    for c in range(0, p.columns, 2 * LANES):
        two = p.columns - c > LANES
        out, matrix, n = scores + 4 * c, page + p.width * c, p.head_dim
        if rows > 1 and two:
            _set_4x2(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)
        elif rows > 1:
            _set_4x1(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)
        elif two:
            _set_1x2(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)
        else:
            _set_1x1(out, stride, q, 4 * n, matrix, p.columns * p.width, n, element)


@inner
def add_values(
    total: int, weights: int, stride: int, rows: int, n: int, p: Any, page: int, element: Any
) -> None:
    """total[rows, depth] += weights[rows, :n] @ the first n rows of a page of values."""
    for c in range(0, p.depth, 2 * LANES):
        two = p.depth - c > LANES
        out, matrix = total + 4 * c, page + p.width * c
        if rows > 1 and two:
            _add_4x2(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
        elif rows > 1:
            _add_4x1(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
        elif two:
            _add_1x2(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
        else:
            _add_1x1(out, 4 * p.depth, weights, stride, matrix, p.depth * p.width, n, element)
