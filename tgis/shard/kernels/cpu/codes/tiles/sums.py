"""Builders of the LLVM code that adds products of rows of x and pieces to sums.

A cell is the product of a row and a column of a piece. An element of the result is a chain of multiply-adds
of cells and scales, over all pieces in their order, whatever the number of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tgis.shard.kernels.cpu.amx.inner_loop import open_tiles
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.inner_loop import load_zeros
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, PIECE, PLANE, UNIT, VECTORS
from tgis.shard.kernels.cpu.codes.tiles.pairs import PAIR_ROW, UNIT_PAIRS
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import FUSED, I64

SUMS, X, WEIGHTS = 0, 1, 2  # tiles: cells of a vector, rows of x, and weights
_NUM_CELLS = 4  # tiles of cells in memory, which are used in turns
CELLS_BYTES = max(_NUM_CELLS * TILE_ROWS * ROW_BYTES, 4 * COLUMNS * TILE_ROWS)
_MAX_STEPS = PIECE // UNIT * UNIT_PAIRS // TILE_ROWS  # maximum tiles of a vector of a piece
_HEIGHTS = (TILE_ROWS // 2, TILE_ROWS)  # rows whose sums are in registers


class _Factors(NamedTuple):
    """Scales of a vector of a piece, and its offsets or zeros. A matrix has at most one of them."""

    scales: Any
    offsets: Any | None
    zeros: Any | None

    def add(self, b: Any, total: Any, cell: Any, row_sum: Callable[[], Any]) -> Any:
        """Emit total + row sum * offsets + (cell - zeros * row sum) * scales."""
        if self.offsets is not None:
            total = llvm.multiply_add(b, row_sum(), self.offsets, total)
        if self.zeros is not None:
            cell = b.fsub(cell, b.fmul(self.zeros, row_sum(), **FUSED), **FUSED)
        return llvm.multiply_add(b, cell, self.scales, total)


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
                place = b.add(b.mul(r, I64(PAIR_ROW)), I64(4 * LANES * v))
                cell = llvm.load_vector(b, b.add(cells, place), LANES)
                total = llvm.load_vector(b, b.add(sums, place), LANES)
                llvm.store_vector(b, factors.add(b, total, cell, lambda: row_sum), b.add(sums, place))
            return []

        llvm.loop(b, rows, [], add_row)

    _choose_terms(b, has_offsets, zeros, build)


@llvm_function()
def multiply_block(
    b: Any,
    memory: Any,
    rows: Any,
    is_first: Any,
    sums: Any,
    out: Any,
    out_bytes: Any,
    cells: Any,
    x: Any,
    x_bytes: Any,
    row_bytes: Any,
    row_sums: Any,
    pairs: Any,
    pieces: Any,
    steps: Any,
    tile_bytes: Any,
    scales: Any,
    scale_bytes: Any,
    has_offsets: Any,
    zeros: Any,
) -> None:
    """Add the products of up to TILE_ROWS rows of x and widened pieces to sums, [TILE_ROWS, COLUMNS], or to
    zeros if `is_first`. Write the result to `out`, of the same shape.

    Numbers that end with `_bytes` are distances: of rows of out, of pieces and rows of x, of tiles of
    weights, and of the scales of pieces. A piece has `steps` times VECTORS tiles."""
    tiles = open_tiles(b, memory)
    operands = (is_first, sums, out, out_bytes, cells, x, x_bytes, row_bytes, row_sums, pairs, pieces)
    block = _Block(b, tiles, *operands)
    end = b.append_basic_block("end")
    is_tall = b.zext(b.icmp_signed(">", rows, I64(_HEIGHTS[0])), I64)
    cases = b.switch(b.add(b.mul(steps, I64(2)), is_tall), end)
    for num_steps in range(1, _MAX_STEPS + 1):
        for i, height in enumerate(_HEIGHTS):
            case = b.append_basic_block(f"steps{num_steps}rows{height}")
            cases.add_case(I64(2 * num_steps + i), case)
            b.position_at_end(case)
            _choose_terms(
                b,
                has_offsets,
                zeros,
                lambda terms, s=num_steps, h=height: block.multiply(
                    terms, s, h, tile_bytes, scales, scale_bytes, zeros
                ),
            )
            b.branch(end)
    b.position_at_end(end)


class _Block(NamedTuple):
    """Builder and operands of `multiply_block`."""

    b: Any
    tiles: Any
    is_first: Any
    sums: Any
    out: Any
    out_bytes: Any
    cells: Any
    x: Any
    x_bytes: Any
    row_bytes: Any
    row_sums: Any
    pairs: Any
    pieces: Any

    def multiply(
        self,
        terms: _Terms,
        steps: int,
        height: int,
        tile_bytes: Any,
        scales: Any,
        scale_bytes: Any,
        zeros: Any,
    ) -> None:
        """Emit the code for pieces of `steps` steps. The sums of a vector of `height` rows are in
        registers."""
        b = self.b
        is_first = b.icmp_signed("!=", self.is_first, I64(0))
        step_bytes = b.mul(tile_bytes, I64(VECTORS))
        piece_bytes = b.mul(step_bytes, I64(steps))

        def add_vector(v: Any, _: list[Any]) -> list[Any]:
            offset = b.mul(v, I64(4 * LANES))
            begin, to = b.add(self.sums, offset), b.add(self.out, offset)
            earlier = [llvm.load_vector(b, b.add(begin, I64(PAIR_ROW * r)), LANES) for r in range(height)]
            totals = [b.select(is_first, llvm.constant(0.0, LANES), total) for total in earlier]
            weights = b.add(self.pairs, b.mul(v, tile_bytes))
            column = b.mul(v, I64(LANES))

            def add_piece(piece: Any, totals: list[Any]) -> list[Any]:
                turn = b.and_(piece, I64(_NUM_CELLS - 1))
                cells = b.add(self.cells, b.mul(turn, I64(TILE_ROWS * ROW_BYTES)))
                source = b.add(self.x, b.mul(piece, self.x_bytes))
                tiles = b.add(weights, b.mul(piece, piece_bytes))
                self._compute_cells(cells, source, tiles, steps, step_bytes)
                factors = terms.load(
                    b,
                    b.add(scales, b.mul(piece, scale_bytes)),
                    b.add(zeros, b.mul(piece, I64(COLUMNS))),
                    column,
                )
                ends = b.add(self.row_sums, b.mul(piece, self.x_bytes))
                return [
                    factors.add(
                        b,
                        total,
                        llvm.load_vector(b, b.add(cells, I64(ROW_BYTES * r)), LANES),
                        lambda r=r: llvm.load_broadcast(b, b.add(ends, I64(4 * r)), LANES),
                    )
                    for r, total in enumerate(totals)
                ]

            totals = llvm.loop(b, self.pieces, totals, add_piece, unrolls=False)
            for r, total in enumerate(totals):
                llvm.store_vector(b, total, b.add(to, b.mul(self.out_bytes, I64(r))))
            return []

        llvm.loop(b, I64(VECTORS), [], add_vector, unrolls=False)

    def _compute_cells(self, cells: Any, x: Any, weights: Any, steps: int, step_bytes: Any) -> None:
        b, tiles = self.b, self.tiles
        tiles.clear(SUMS)
        for step in range(steps):
            tiles.load(X, b.add(x, I64(ROW_BYTES * step)), self.row_bytes)
            tiles.load(WEIGHTS, b.add(weights, b.mul(step_bytes, I64(step))), I64(ROW_BYTES))
            tiles.add_pairs(SUMS, X, WEIGHTS)
        tiles.store(SUMS, cells, I64(ROW_BYTES))
