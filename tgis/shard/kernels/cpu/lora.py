"""Compiled kernel of LoRA: one call adds the deltas of all adapters of a step, y += x a b.

The kernel is vectorised by hand, like attention's products. The order of a sum depends only on its column and
the sizes of a and b, so a row's bits depend neither on the other rows nor on its place."""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core.cgutils import get_or_insert_function

from tgis.shard.kernels.cpu.jit.compiler import Kernel, intrinsic, keep, ordered, pointer, take

LANES = 8
ROWS = 4  # rows of the taller tiles
LONG = 8  # most vectors of a single row's tile
BAND = LONG * LANES  # columns that all rows are multiplied with before the next are read
CHAINS = 4  # independent sums that a lone vector of x a is split into

_I64 = np.int64(0)
_FLOAT, _INT, _WIDE = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _MASK = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(1), LANES)
_NONE = ir.Constant(_VECTOR, [0.0] * LANES)
_FUSED = {"flags": ("contract",)}


class Part(NamedTuple):
    """Delta of one adapter for some columns of one layer (`LowRank`)."""

    a: int  # address of float32 [in_features, rank]
    b: int  # address of float32 [rank, width]
    rank: int
    first: int
    width: int


class Rows(NamedTuple):
    """Scratch memory of a thread: the addresses of the rows of a unit of work."""

    x: Any  # [most_rows]
    product: Any  # [most_rows]: rows of x a, which are in `scratch`
    y: Any  # [most_rows]
    scratch: Any  # [most_rows, most_rank]


def _everywhere(b: Any, x: Any, scalar: Any) -> Any:
    """Broadcast a value to all lanes."""
    vector = ir.VectorType(scalar, LANES)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), x, _INT(0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


class _Vectors:
    """Builder of loads and stores of float32 vectors, of the first `count` lanes if that is given."""

    def __init__(self, b: Any, count: Any = None):
        self._b, self._mask = b, None
        if count is not None:
            lanes = ir.Constant(ir.VectorType(_WIDE, LANES), list(range(LANES)))
            self._mask = b.icmp_signed("<", lanes, _everywhere(b, count, _WIDE))

    def _function(self, name: str, *arguments: Any, returns: Any) -> Any:
        return get_or_insert_function(self._b.module, ir.FunctionType(returns, arguments), name)

    def load(self, address: Any) -> Any:
        """Load a vector. Lanes past `count` are zero."""
        place = self._b.inttoptr(address, _VECTOR.as_pointer())
        if self._mask is None:
            return self._b.load(place, align=4)
        arguments = (place.type, _INT, _MASK, _VECTOR)
        function = self._function(f"llvm.masked.load.v{LANES}f32.p0", *arguments, returns=_VECTOR)
        return self._b.call(function, [place, _INT(4), self._mask, _NONE])

    def store(self, x: Any, address: Any) -> None:
        place = self._b.inttoptr(address, _VECTOR.as_pointer())
        if self._mask is None:
            self._b.store(x, place, align=4)
        else:
            arguments = (_VECTOR, place.type, _INT, _MASK)
            function = self._function(f"llvm.masked.store.v{LANES}f32.p0", *arguments, returns=ir.VoidType())
            self._b.call(function, [x, place, _INT(4), self._mask])


def _loop(
    b: Any, begin: Any, end: Any, step: int, values: list[Any], build: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit the loop `for k in range(begin, end, step): values = build(k, values)` and return the values."""
    before, test, body, done = b.block, *(b.append_basic_block(name) for name in ("test", "body", "done"))
    b.branch(test)
    b.position_at_end(test)
    k, phis = b.phi(_WIDE), [b.phi(_VECTOR) for _ in values]
    b.cbranch(b.icmp_signed("<", k, end), body, done)
    b.position_at_end(body)
    changed = build(k, phis)
    following = b.add(k, _WIDE(step))
    b.branch(test)
    for phi, first, next_ in zip([k, *phis], [begin, *values], [following, *changed], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_, body)
    b.position_at_end(done)
    return phis


def _chains(b: Any, n: Any, zeros: list[Any], add: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit the sum of `add` for k in range(n) and return it.

    Every CHAINS-th k goes to the same partial sum; the remainder goes to the first."""

    def add_each(k: Any, sums: list[Any]) -> list[Any]:
        each = [add(b.add(k, _WIDE(c)), sums[c::CHAINS]) for c in range(CHAINS)]
        return list(chain.from_iterable(zip(*each, strict=True)))

    most = b.sub(n, b.srem(n, _WIDE(CHAINS)))
    each = _loop(b, _WIDE(0), most, CHAINS, zeros * CHAINS, add_each)
    sums = _loop(b, most, n, 1, each[::CHAINS], add)
    for c in range(1, CHAINS):
        sums = [b.fadd(total, more) for total, more in zip(sums, each[c::CHAINS], strict=True)]
    return sums


def _product(num_rows: int, num_vectors: int, adds: bool, is_partial: bool = False) -> Any:
    """Build a function for kernels that computes out[:num_rows, columns] = factors[:num_rows, :n] @
    matrix[:n, columns] in float32, or += if `adds`. It takes as many columns as the vectors have, or the
    first `count` of them if `is_partial`.

    Its arguments: `outs`, the address of the row addresses of out, and `offset`, the bytes from a row's start
    to the first column; `factors`, the address of the row addresses of factors; `matrix`, the address of the
    first column in the matrix, and `stride`, the bytes from one of its rows to the next; `n`; `count`."""
    cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
    # A lone vector has too few independent sums to hide the latency of additions.
    is_chained = is_partial and not adds

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        outs, offset, factors, matrix, stride, n, count = args
        vectors = _Vectors(b, count if is_partial else None)

        def row(addresses: Any, r: int) -> Any:
            return b.load(b.inttoptr(b.add(addresses, _WIDE(8 * r)), _WIDE.as_pointer()))

        begins = [b.add(row(outs, r), offset) for r in range(num_rows)]
        places = [b.add(begins[r], _WIDE(4 * LANES * v)) for r, v in cells]
        sources = [row(factors, r) for r in range(num_rows)]

        def add(k: Any, sums: list[Any]) -> list[Any]:
            begin, column = b.add(matrix, b.mul(k, stride)), b.mul(k, _WIDE(4))
            loaded = [vectors.load(b.add(begin, _WIDE(4 * LANES * v))) for v in range(num_vectors)]
            found = [b.inttoptr(b.add(source, column), _FLOAT.as_pointer()) for source in sources]
            spread = [_everywhere(b, b.load(place, align=4), _FLOAT) for place in found]
            products = [b.fmul(spread[r], loaded[v], **_FUSED) for r, v in cells]
            return [b.fadd(total, more, **_FUSED) for total, more in zip(sums, products, strict=True)]

        initial = [vectors.load(place) if adds else _NONE for place in places]
        sums = _chains(b, n, initial, add) if is_chained else _loop(b, _WIDE(0), n, 1, initial, add)
        for place, total in zip(places, sums, strict=True):
            vectors.store(total, place)
        return context.get_dummy_value()

    i = types.int64

    def product(
        typingctx: Any, outs: Any, offset: Any, factors: Any, matrix: Any, stride: Any, n: Any, count: Any
    ) -> Any:
        return types.void(i, i, i, i, i, i, i), generate

    return intrinsic(product)


def _multiply(adds: bool) -> Any:
    """Build the product for any number of rows and columns. It overwrites out unless `adds`."""
    tall_2, tall_1 = _product(ROWS, 2, adds), _product(ROWS, 1, adds, is_partial=True)
    flat_long, flat_2 = _product(1, LONG, adds), _product(1, 2, adds)
    flat_1 = _product(1, 1, adds, is_partial=True)

    @ordered
    def multiply_tall(o: int, to: int, f: int, matrix: int, stride: int, n: int, columns: int) -> None:
        whole = columns // (2 * LANES) * (2 * LANES)
        for c in range(0, whole, 2 * LANES):
            tall_2(o, to + 4 * c, f, matrix + 4 * c, stride, n, 2 * LANES)
        for c in range(whole, columns, LANES):
            tall_1(o, to + 4 * c, f, matrix + 4 * c, stride, n, min(LANES, columns - c))

    @ordered
    def multiply_flat(o: int, to: int, f: int, matrix: int, stride: int, n: int, columns: int) -> None:
        most, whole = columns // (LONG * LANES) * (LONG * LANES), columns // (2 * LANES) * (2 * LANES)
        for c in range(0, most, LONG * LANES):
            flat_long(o, to + 4 * c, f, matrix + 4 * c, stride, n, LONG * LANES)
        for c in range(most, whole, 2 * LANES):
            flat_2(o, to + 4 * c, f, matrix + 4 * c, stride, n, 2 * LANES)
        for c in range(whole, columns, LANES):
            flat_1(o, to + 4 * c, f, matrix + 4 * c, stride, n, min(LANES, columns - c))

    @ordered
    def multiply(
        outs: int, offset: int, factors: int, rows: int, matrix: int, stride: int, n: int, columns: int
    ) -> None:
        """Compute `_product` for any number of rows and columns. All rows share the reads of the matrix."""
        tall = rows // ROWS * ROWS
        for c in range(0, columns, BAND):
            to, source, count = offset + 4 * c, matrix + 4 * c, min(BAND, columns - c)
            for r in range(0, tall, ROWS):
                multiply_tall(outs + 8 * r, to, factors + 8 * r, source, stride, n, count)
            for r in range(tall, rows):
                multiply_flat(outs + 8 * r, to, factors + 8 * r, source, stride, n, count)

    return multiply


_set, _add = _multiply(False), _multiply(True)


@ordered
def _add_part(p: Any, rows: int, in_features: int, begin: int, end: int, s: Any) -> None:
    """Add a delta to columns [begin, end) of y. If `in_features` is 0, x already holds rows of x a."""
    first, last = max(p.first, begin), min(p.first + p.width, end)
    if first >= last:
        return
    factors = s.x.ctypes.data
    if in_features:
        factors = s.product.ctypes.data
        _set(factors, 0, s.x.ctypes.data, rows, p.a, 4 * p.rank, in_features, p.rank)
    matrix = p.b + 4 * (first - p.first)
    _add(s.y.ctypes.data, 4 * first, factors, rows, matrix, 4 * p.width, p.rank, last - first)


def _add_low_rank(args: Any) -> None:
    """Add a step's deltas. A unit of work is a tile (some tokens of one adapter) and a slice of columns."""
    a = carray(args, 15)
    num_tiles, num_slices, columns, most_rows, most_rank = a[1], a[2], a[3], a[4], a[5]
    in_features, out_features, x, y, ids = a[6], a[7], a[8], a[9], a[10]
    order, bounds, table = pointer(a[11], _I64), pointer(a[13], _I64), pointer(a[14], _I64)
    tiles = carray(pointer(a[12], _I64), (num_tiles, 3))
    addresses = np.empty((3, most_rows), np.int64)
    s = Rows(addresses[0], addresses[1], addresses[2], np.empty((most_rows, most_rank), np.float32))
    for r in range(most_rows):
        s.product[r] = s.scratch.ctypes.data + 4 * r * most_rank
    unit = take(args)
    while unit < num_tiles * num_slices:
        tile, begin = unit // num_slices, unit % num_slices * columns
        adapter, start, rows = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        for r in range(rows):
            s.x[r] = x + 4 * order[start + r] * in_features
            s.y[r] = y + 4 * order[start + r] * out_features
        for i in range(5 * bounds[adapter], 5 * bounds[adapter + 1], 5):
            p = Part(table[i], table[i + 1], table[i + 2], table[i + 3], table[i + 4])
            if ids:
                for r in range(rows):
                    s.x[r] = p.a + 4 * pointer(ids, _I64)[order[start + r]] * p.rank
            _add_part(p, rows, in_features, begin, min(begin + columns, out_features), s)
        unit = take(args)
    keep(s.scratch)


add_low_rank = Kernel(_add_low_rank)
