"""The one kernel that is vectorised by hand: a small matrix product that keeps its sums in registers.

LLVM cannot prove that numba's arrays do not overlap and so reloads every sum; this says it outright, in LLVM IR. Each
sum is one chain of fused multiply-adds in the order of `n`, so its bits depend on its own row and column alone."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 8  # columns come in multiples of this
ROWS = 4  # rows of one call to the tall variants

_FLOAT, _BYTE, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_STORED = {types.float32: _FLOAT, types.uint16: ir.IntType(16), types.int16: ir.HalfType()}
_FUSED = {"flags": ("contract",)}


def _at(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Pointer to an `element` at byte `offset` from the address `base`."""
    return b.inttoptr(b.add(base, offset), element.as_pointer())


def _load_matrix(b: Any, address: Any, offset: Any, dtype: Any) -> Any:
    """Eight stored elements as float32: uint16 holds bfloat16 bits, int16 float16 bits."""
    stored = _STORED[dtype]
    x = b.load(_at(b, address, offset, ir.VectorType(stored, LANES)), align=2)
    if dtype == types.int16:
        return b.fpext(x, _VECTOR)
    if dtype == types.uint16:
        wide = ir.VectorType(_I32, LANES)
        return b.bitcast(b.shl(b.zext(x, wide), ir.Constant(wide, [16] * LANES)), _VECTOR)
    return x


def _broadcast(b: Any, address: Any, offset: Any) -> Any:
    factor = b.load(_at(b, address, offset, _FLOAT), align=4)
    one = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), factor, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _generate(rows: int, vectors: int, add: bool) -> Callable[..., Any]:
    """Code generator of a product with `rows` x `vectors` registers of sums."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, out_stride, factors, factor_stride, matrix, matrix_stride, n, _ = args
        dtype = signature.args[-1]
        width = dtype.bitwidth // 8 * LANES

        def number(x: int) -> Any:
            return ir.Constant(_I64, x)

        places = [
            _at(b, out, b.add(b.mul(number(r), out_stride), number(v * LANES * 4)), _VECTOR)
            for r in range(rows)
            for v in range(vectors)
        ]
        initial = [b.load(p, align=4) if add else ir.Constant(_VECTOR, [0.0] * LANES) for p in places]
        before, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        k, sums = b.phi(_I64), [b.phi(_VECTOR) for _ in places]
        row = [_load_matrix(b, matrix, b.add(b.mul(k, matrix_stride), number(v * width)), dtype) for v in range(vectors)]
        added = []
        for r in range(rows):
            factor = _broadcast(b, factors, b.add(b.mul(number(r), factor_stride), b.mul(k, number(4))))
            for v in range(vectors):
                added.append(b.fadd(sums[r * vectors + v], b.fmul(factor, row[v], **_FUSED), **_FUSED))
        following = b.add(k, number(1))
        for phi, first, next_ in zip([k, *sums], [number(0), *initial], [following, *added], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(next_, loop)
        b.cbranch(b.icmp_signed("<", following, n), loop, done)
        b.position_at_end(done)
        for place, total in zip(places, added, strict=True):
            b.store(total, place, align=4)
        return context.get_dummy_value()

    return generate


def _product(rows: int, vectors: int, add: bool) -> Any:
    """out[:rows, : vectors * LANES] (+)= factors[:rows, :n] @ matrix[:n, ...].

    Arguments: the addresses of out, factors (float32) and matrix, each followed by the bytes from one row to the next;
    n, at least 1; and a value of the matrix' type."""
    generate = _generate(rows, vectors, add)
    i = types.int64

    def product(
        typingctx: Any, out: Any, out_stride: Any, factors: Any, factor_stride: Any, matrix: Any, matrix_stride: Any,
        n: Any, element: Any,
    ) -> Any:  # fmt: skip
        return types.void(i, i, i, i, i, i, i, element), generate

    return intrinsic(product)


set_4x2, set_4x1, set_1x2, set_1x1 = (_product(r, v, False) for r in (ROWS, 1) for v in (2, 1))
add_4x2, add_4x1, add_1x2, add_1x1 = (_product(r, v, True) for r in (ROWS, 1) for v in (2, 1))
