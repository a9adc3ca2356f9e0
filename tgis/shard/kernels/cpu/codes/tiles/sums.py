"""Builders of the LLVM code that adds products of rows of x and pieces to sums.

A cell is the product of a row and a column of a piece, a float or, with rounded activations, an exact
integer. An element of the result is a chain of multiply-adds of cells and scales, over all pieces in their
order, whatever the number of rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from tgis.shard.kernels.cpu.amx.inner_loop import open_tiles
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.inner_loop import load_zeros
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, PLANE, VECTORS
from tgis.shard.kernels.cpu.codes.tiles.widening import WIDE_ROW
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, FUSED, I32, I64

# Tiles: cells of each vector, rows of x, and weights, in turns.
X = VECTORS
WEIGHTS = VECTORS + 1
NUM_WEIGHTS = 3
CELLS_BYTES = TILE_ROWS * WIDE_ROW  # bytes of the cells of a piece
_TILE_BYTES = TILE_ROWS * ROW_BYTES
_FLOATS, _INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
_HEIGHTS = (TILE_ROWS // 4, TILE_ROWS // 2, TILE_ROWS)  # rows whose sums of a vector are in registers


class _Factors(NamedTuple):
    """Scales of a vector of a piece, and its offsets or zeros. A matrix has at most one of them."""

    scales: Any
    offsets: Any | None
    zeros: Any | None

    def add(
        self,
        b: Any,
        total: Any,
        cell: Any,
        row_sum: Callable[[], Any],
        row_scale: Callable[[], Any] | None = None,
    ) -> Any:
        """Emit total + row sum * offsets + (cell - zeros * row sum) * scales. Rows may have scales, too."""
        if self.offsets is not None:
            total = llvm.multiply_add(b, row_sum(), self.offsets, total)
        if self.zeros is not None:
            cell = b.fsub(cell, b.fmul(self.zeros, row_sum(), **FUSED), **FUSED)
        scales = self.scales if row_scale is None else b.fmul(row_scale(), self.scales)
        return llvm.multiply_add(b, cell, scales, total)


class _Terms(NamedTuple):
    """Terms of a matrix besides scales."""

    offsets: bool
    zeros: bool

    def load(self, b: Any, scales: Any, zeros: Any, place: Any) -> _Factors:
        """Emit the loads of a vector. `place` is the number of its first column."""
        at = b.add(scales, b.mul(place, I64(4)))
        return _Factors(
            llvm.load_vector(b, at, LANES),
            llvm.load_vector(b, b.add(at, I64(PLANE)), LANES) if self.offsets else None,
            load_zeros(b, b.add(zeros, place), 0) if self.zeros else None,
        )


def _choose_terms(b: Any, has_offsets: Any, zeros: Any, build: Callable[[_Terms], None]) -> None:
    """Emit code for each combination of terms. `zeros` is an address, or 0."""
    with b.if_else(b.icmp_signed("!=", zeros, I64(0))) as (with_zeros, without_zeros):
        with with_zeros:
            build(_Terms(offsets=False, zeros=True))
        with without_zeros, b.if_else(b.icmp_signed("!=", has_offsets, I64(0))) as (given, neither):
            with given:
                build(_Terms(offsets=True, zeros=False))
            with neither:
                build(_Terms(offsets=False, zeros=False))


@llvm_function()
def add_cells(
    b: Any, sums: Any, cells: Any, rows: Any, row_sums: Any, scales: Any, has_offsets: Any, zeros: Any
) -> None:
    """Add a piece's cells, [rows, COLUMNS], to sums, [rows, COLUMNS]."""

    def build(terms: _Terms) -> None:
        vectors = [terms.load(b, scales, zeros, I64(LANES * v)) for v in range(VECTORS)]

        def add_row(r: Any, _: list[Any]) -> list[Any]:
            row_sum = llvm.load_broadcast(b, b.add(row_sums, b.mul(r, I64(4))), LANES)
            for v, factors in enumerate(vectors):
                place = b.add(b.mul(r, I64(WIDE_ROW)), I64(4 * LANES * v))
                cell = llvm.load_vector(b, b.add(cells, place), LANES)
                total = llvm.load_vector(b, b.add(sums, place), LANES)
                llvm.store_vector(b, factors.add(b, total, cell, lambda: row_sum), b.add(sums, place))
            return []

        llvm.loop(b, rows, [], add_row)

    _choose_terms(b, has_offsets, zeros, build)


@llvm_function()
def compute_cells(
    b: Any,
    memory: Any,
    cells: Any,
    x: Any,
    x_bytes: Any,
    row_bytes: Any,
    wide: Any,
    pieces: Any,
    steps: Any,
    tile_bytes: Any,
    element: Any,
) -> None:
    """Compute the cells of pieces, [pieces, VECTORS, TILE_ROWS, LANES], for the configured rows of x.

    A widened piece has `steps` times VECTORS tiles. Numbers that end with `_bytes` are distances: of pieces
    and rows of x, and of tiles."""
    tiles = open_tiles(b, memory)
    add = tiles.add_signed_quads if KINDS[element].rounds_activations else tiles.add_pairs
    step_bytes = b.mul(tile_bytes, I64(VECTORS))
    piece_bytes = b.mul(step_bytes, steps)

    def compute_piece(piece: Any, _: list[Any]) -> list[Any]:
        source, weights = b.add(x, b.mul(piece, x_bytes)), b.add(wide, b.mul(piece, piece_bytes))
        to = b.add(cells, b.mul(piece, I64(CELLS_BYTES)))
        for v in range(VECTORS):
            tiles.clear(v)

        def add_step(step: Any, _: list[Any]) -> list[Any]:
            tiles.load(X, b.add(source, b.mul(step, I64(ROW_BYTES))), row_bytes)
            begin = b.add(weights, b.mul(step, step_bytes))
            for v in range(VECTORS):
                tile = WEIGHTS + v % NUM_WEIGHTS
                tiles.load(tile, b.add(begin, b.mul(tile_bytes, I64(v))), I64(ROW_BYTES))
                add(v, X, tile)
            return []

        llvm.loop(b, steps, [], add_step, unrolls=False)
        for v in range(VECTORS):
            tiles.store(v, b.add(to, I64(_TILE_BYTES * v)), I64(ROW_BYTES))
        return []

    llvm.loop(b, pieces, [], compute_piece, unrolls=False)


class _BlockSums(NamedTuple):
    """Builder and operands of `add_block`."""

    b: Any
    is_first: Any
    sums: Any
    out: Any
    out_bytes: Any
    cells: Any
    pieces: Any
    row_sums: Any
    row_scales: Any | None
    x_bytes: Any
    scales: Any
    scale_bytes: Any
    zeros: Any

    def add(self, height: int, terms: _Terms) -> None:
        """Emit the code for up to `height` rows."""
        llvm.loop(self.b, I64(VECTORS), [], partial(self._add_vector, height, terms), unrolls=False)

    def _add_vector(self, height: int, terms: _Terms, v: Any, _: list[Any]) -> list[Any]:
        """Emit the sums of a vector, which stay in registers for all pieces."""
        b = self.b
        offset = b.mul(v, I64(4 * LANES))
        places = [b.add(b.add(self.sums, offset), I64(WIDE_ROW * r)) for r in range(height)]
        earlier = [llvm.load_vector(b, place, LANES) for place in places]
        totals = [b.select(self.is_first, llvm.constant(0.0, LANES), total) for total in earlier]
        totals = llvm.loop(b, self.pieces, totals, partial(self._add_piece, terms, v), unrolls=False)
        for r, total in enumerate(totals):
            place = b.add(b.add(self.out, offset), b.mul(self.out_bytes, I64(r)))
            llvm.store_vector(b, total, place)
        return []

    def _add_piece(self, terms: _Terms, v: Any, piece: Any, totals: list[Any]) -> list[Any]:
        b = self.b
        cells = b.add(b.mul(piece, I64(CELLS_BYTES)), b.mul(v, I64(_TILE_BYTES)))
        scales = b.add(self.scales, b.mul(piece, self.scale_bytes))
        zeros = b.add(self.zeros, b.mul(piece, I64(COLUMNS)))
        after = b.mul(piece, self.x_bytes)
        factors = terms.load(b, scales, zeros, b.mul(v, I64(LANES)))

        def add_row(r: int, total: Any) -> Any:
            cell = self._load_cell(b.add(b.add(self.cells, cells), I64(ROW_BYTES * r)))
            row_sum = self._find_number(self.row_sums, after, r)
            if self.row_scales is None:
                return factors.add(b, total, cell, row_sum)
            return factors.add(b, total, cell, row_sum, self._find_number(self.row_scales, after, r))

        return [add_row(r, total) for r, total in enumerate(totals)]

    def _load_cell(self, place: Any) -> Any:
        b = self.b
        if self.row_scales is None:
            return llvm.load_vector(b, place, LANES)
        return b.sitofp(b.load(llvm.pointer_to(b, _INTEGERS, place), align=ROW_BYTES), _FLOATS)

    def _find_number(self, begin: Any, after: Any, row: int) -> Callable[[], Any]:
        """Return the builder of the load of a row's number."""
        place = self.b.add(self.b.add(begin, after), I64(4 * row))
        return partial(llvm.load_broadcast, self.b, place, LANES)


@llvm_function()
def add_block(
    b: Any,
    rows: Any,
    is_first: Any,
    sums: Any,
    out: Any,
    out_bytes: Any,
    cells: Any,
    pieces: Any,
    row_sums: Any,
    row_scales: Any,
    x_bytes: Any,
    scales: Any,
    scale_bytes: Any,
    has_offsets: Any,
    zeros: Any,
    element: Any,
) -> None:
    """Add the cells of pieces to sums, [rows, COLUMNS], or to zeros if `is_first`, and write the result to
    `out`, of the same shape. There are up to TILE_ROWS rows. Memory of following rows is read and written.

    Numbers that end with `_bytes` are distances: of rows of out, of the sums and scales of x's pieces, and of
    the scales of pieces."""
    begins = b.icmp_signed("!=", is_first, I64(0))
    own_scales = row_scales if KINDS[element].rounds_activations else None
    of_pieces = (cells, pieces, row_sums, own_scales, x_bytes, scales, scale_bytes, zeros)
    block = _BlockSums(b, begins, sums, out, out_bytes, *of_pieces)

    def build(height: int) -> None:
        _choose_terms(b, has_offsets, zeros, partial(block.add, height))

    _choose_height(b, rows, _HEIGHTS, build)


def _choose_height(b: Any, rows: Any, heights: Sequence[int], build: Callable[[int], None]) -> None:
    """Emit code for the smallest height that all rows fit."""
    height, *others = heights
    if not others:
        build(height)
        return
    with b.if_else(b.icmp_signed("<=", rows, I64(height))) as (fit, others_fit):
        with fit:
            build(height)
        with others_fit:
            _choose_height(b, rows, others, build)
