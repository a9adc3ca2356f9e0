"""Compiled LoRA kernel: one call adds the updates of all adapters of a step, y += x a b. The order of a sum
depends only on its column and the sizes of a and b, so a row's bits depend neither on other rows nor on its
position."""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    keep_alive,
    llvm_function,
    next_unit,
    operands,
    ordered,
    pointer,
)
from tgis.shard.kernels.cpu.jit.llvm import I64

LANES = 8
ROWS = 4  # rows of a tall tile
LONG = 8  # maximum vectors of a tile of one row
BAND = LONG * LANES  # columns that all rows use before the next columns are read
PARTIAL_SUMS = 4  # independent sums for a single vector of x a

_I64 = np.int64(0)


class DeltaArgs(NamedTuple):
    """Update of one adapter for adjacent columns of one layer: the fields of `LowRank.row`."""

    a: int  # address of float32 [in_features, rank]
    b: int  # address of float32 [rank, width]
    rank: int
    first: int
    width: int


class RowAddresses(NamedTuple):
    """Scratch memory of a thread: addresses of the rows of a unit of work."""

    x: Any  # [max_rows]
    product: Any  # [max_rows]: rows of x a in `scratch`
    y: Any  # [max_rows]
    scratch: Any  # [max_rows, max_rank]


def _sum_in_parts(b: Any, n: Any, zeros: list[Any], add: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit the sum of `add` over k in range(n) as PARTIAL_SUMS sums. The first includes the remainder."""

    def add_each(k: Any, sums: list[Any]) -> list[Any]:
        each = [add(b.add(k, I64(c)), sums[c::PARTIAL_SUMS]) for c in range(PARTIAL_SUMS)]
        return list(chain.from_iterable(zip(*each, strict=True)))

    split_end = b.sub(n, b.srem(n, I64(PARTIAL_SUMS)))
    each = llvm.loop_range(b, I64(0), split_end, PARTIAL_SUMS, zeros * PARTIAL_SUMS, add_each)
    sums = llvm.loop_range(b, split_end, n, 1, each[::PARTIAL_SUMS], add)
    for c in range(1, PARTIAL_SUMS):
        sums = [b.fadd(total, more) for total, more in zip(sums, each[c::PARTIAL_SUMS], strict=True)]
    return sums


def _product(num_rows: int, num_vectors: int, adds: bool, is_partial: bool = False) -> Any:
    """Build a kernel function: out[:num_rows, columns] = factors[:num_rows, :n] @ matrix[:n, columns] in
    float32, or += if `adds`. It computes num_vectors * LANES columns or, if `is_partial`, the first `count`
    of them.

    Arguments: `outs`, address of the row addresses of out; `offset`, bytes from the start of a row to the
    first column; `factors`, address of the row addresses of factors; `matrix`, address of the first column of
    the matrix; `stride`, bytes between its rows; `n`; `count`."""
    cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
    # A single vector has too few independent sums to hide the latency of additions.
    in_parts = is_partial and not adds

    @llvm_function()
    def product(
        b: Any, outs: Any, offset: Any, factors: Any, matrix: Any, stride: Any, n: Any, count: Any
    ) -> None:
        mask = llvm.first_lanes(b, count, LANES) if is_partial else None
        begins, sources = (
            [b.load(llvm.pointer_to(b, I64, addresses, I64(8 * r))) for r in range(num_rows)]
            for addresses in (outs, factors)
        )
        places = [b.add(b.add(begins[r], offset), I64(4 * LANES * v)) for r, v in cells]

        def add(k: Any, sums: list[Any]) -> list[Any]:
            begin, column = b.add(matrix, b.mul(k, stride)), b.mul(k, I64(4))
            columns = [b.add(begin, I64(4 * LANES * v)) for v in range(num_vectors)]
            loaded = [llvm.load_vector(b, address, LANES, mask) for address in columns]
            values = [llvm.load_broadcast(b, b.add(source, column), LANES) for source in sources]
            return llvm.add_products(b, sums, values, loaded)

        initial = [
            llvm.load_vector(b, place, LANES, mask) if adds else llvm.constant(0.0, LANES) for place in places
        ]
        sums = (
            _sum_in_parts(b, n, initial, add) if in_parts else llvm.loop_range(b, I64(0), n, 1, initial, add)
        )
        for place, total in zip(places, sums, strict=True):
            llvm.store_vector(b, total, place, mask)

    return product


def _multiply(adds: bool) -> Any:
    """Build `_product` for any number of rows and columns. Overwrites out unless `adds`."""
    tall_2 = _product(ROWS, 2, adds)
    tall_1 = _product(ROWS, 1, adds, is_partial=True)
    row_long = _product(1, LONG, adds)
    row_2 = _product(1, 2, adds)
    row_1 = _product(1, 1, adds, is_partial=True)

    @ordered
    def multiply_tall(o: int, to: int, f: int, matrix: int, stride: int, n: int, columns: int) -> None:
        pair_end = columns // (2 * LANES) * (2 * LANES)
        for c in range(0, pair_end, 2 * LANES):
            tall_2(o, to + 4 * c, f, matrix + 4 * c, stride, n, 2 * LANES)
        for c in range(pair_end, columns, LANES):
            tall_1(o, to + 4 * c, f, matrix + 4 * c, stride, n, min(LANES, columns - c))

    @ordered
    def multiply_row(o: int, to: int, f: int, matrix: int, stride: int, n: int, columns: int) -> None:
        long_end = columns // (LONG * LANES) * (LONG * LANES)
        pair_end = columns // (2 * LANES) * (2 * LANES)
        for c in range(0, long_end, LONG * LANES):
            row_long(o, to + 4 * c, f, matrix + 4 * c, stride, n, LONG * LANES)
        for c in range(long_end, pair_end, 2 * LANES):
            row_2(o, to + 4 * c, f, matrix + 4 * c, stride, n, 2 * LANES)
        for c in range(pair_end, columns, LANES):
            row_1(o, to + 4 * c, f, matrix + 4 * c, stride, n, min(LANES, columns - c))

    @ordered
    def multiply(
        outs: int, offset: int, factors: int, rows: int, matrix: int, stride: int, n: int, columns: int
    ) -> None:
        """Multiply any number of rows and columns. All rows share the reads of the matrix."""
        tall = rows // ROWS * ROWS
        for c in range(0, columns, BAND):
            to = offset + 4 * c
            source = matrix + 4 * c
            count = min(BAND, columns - c)
            for r in range(0, tall, ROWS):
                multiply_tall(outs + 8 * r, to, factors + 8 * r, source, stride, n, count)
            for r in range(tall, rows):
                multiply_row(outs + 8 * r, to, factors + 8 * r, source, stride, n, count)

    return multiply


_set, _add = _multiply(False), _multiply(True)


@ordered
def _add_part(p: Any, rows: int, in_features: int, begin: int, end: int, s: Any) -> None:
    """Add an update to columns [begin, end) of y. If `in_features` is 0, x already holds rows of x a."""
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
    """Add a step's updates. A unit of work is a tile (tokens of one adapter) and a slice of columns."""
    num_tiles, num_slices, columns, max_rows, max_rank = operands(args, 1, 5)
    in_features, out_features, x, y, ids = operands(args, 6, 5)
    order_address, tiles_address, bounds_address, table_address = operands(args, 11, 4)
    order = pointer(order_address, _I64)
    bounds = pointer(bounds_address, _I64)
    table = pointer(table_address, _I64)
    tiles = carray(pointer(tiles_address, _I64), (num_tiles, 3))
    addresses = np.empty((3, max_rows), np.int64)
    s = RowAddresses(addresses[0], addresses[1], addresses[2], np.empty((max_rows, max_rank), np.float32))
    for r in range(max_rows):
        s.product[r] = s.scratch.ctypes.data + 4 * r * max_rank
    unit = next_unit(args)
    while unit < num_tiles * num_slices:
        tile = unit // num_slices
        begin = unit % num_slices * columns
        adapter, start, rows = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        for r in range(rows):
            s.x[r] = x + 4 * order[start + r] * in_features
            s.y[r] = y + 4 * order[start + r] * out_features
        for i in range(5 * bounds[adapter], 5 * bounds[adapter + 1], 5):
            p = DeltaArgs(table[i], table[i + 1], table[i + 2], table[i + 3], table[i + 4])
            if ids:
                for r in range(rows):
                    s.x[r] = p.a + 4 * pointer(ids, _I64)[order[start + r]] * p.rank
            _add_part(p, rows, in_features, begin, min(begin + columns, out_features), s)
        unit = next_unit(args)
    keep_alive(s.scratch)


add_low_rank = Kernel(_add_low_rank)
