"""Product of rows of x and a panel of codes, on AMX tiles or, for few rows, with other instructions.

Adjacent pieces of a panel are widened as a block. All rows are multiplied with a block while the
first-level cache holds it."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.amx.inner_loop import configure
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, SHAPES_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.codes.inner_loop import prefetch_lines
from tgis.shard.kernels.cpu.codes.kernels import (
    copy_sums,
    count_pieces,
    count_units,
    find_ahead,
    find_zeros,
    panel_bytes,
)
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, PIECE, PLANE, VECTORS
from tgis.shard.kernels.cpu.codes.scales import find_scales
from tgis.shard.kernels.cpu.codes.tiles.chains import multiply_few_rows
from tgis.shard.kernels.cpu.codes.tiles.rows import count_step_units
from tgis.shard.kernels.cpu.codes.tiles.sums import (
    CELLS_BYTES,
    NUM_WEIGHTS,
    WEIGHTS,
    X,
    add_block,
    add_cells,
    compute_cells,
)
from tgis.shard.kernels.cpu.codes.tiles.widening import WIDE_ROW, widen_for_tiles
from tgis.shard.kernels.cpu.jit.compiler import ordered, pointer

_WIDE_BLOCK = PIECE // 2 * WIDE_ROW  # maximum bytes of a block, those of the largest piece
# Bytes of a block of several pieces. The first-level cache holds a block, the next one, and cells.
_BLOCK_BYTES = _WIDE_BLOCK // 2
_MAX_PIECES = 4  # maximum pieces of a block
_SINGLE_PIECE_ROWS = 8  # maximum rows of products that wait for weights, which are prefetched with each block
_SCALES = _MAX_PIECES * 2 * PLANE  # bytes of a block's scales and offsets
_CELLS = _MAX_PIECES * CELLS_BYTES
SCRATCH_BYTES = _SCALES + 2 * _WIDE_BLOCK + _CELLS
_WIDTHS_AT, _ROWS_AT, _NUM_SHAPES = 16, 48, 16  # offsets in the configuration, and its number of tiles
_F32, _U16, _U8 = np.float32(0), np.uint16(0), np.uint8(0)


class PanelScratch(NamedTuple):
    """Addresses of a thread's memory."""

    scales: int  # scales and offsets of a block
    wide: int  # two blocks of widened pieces
    cells: int
    sums: int  # float32 [rows in whole tiles, COLUMNS]
    tiles: int  # configuration of tiles


class _BlockShape(NamedTuple):
    """Shape of the blocks of a matrix."""

    pieces: int  # maximum pieces
    stored_bytes: int  # bytes of a stored piece
    wide_bytes: int  # bytes of a widened piece
    steps: int  # tiles of a vector of a piece
    depth: int  # rows of a tile


@ordered
def place_scratch(at: int, tiles: int) -> Any:
    """Return the parts of SCRATCH_BYTES at an address, which are followed by sums."""
    wide = at + _SCALES
    cells = wide + 2 * _WIDE_BLOCK
    return PanelScratch(at, wide, cells, cells + _CELLS, tiles)


@ordered
def clear_scratch(scratch: Any, is_padded: int) -> None:
    """Clear what is multiplied by zeros and so must be finite, and what would take long if it were denormal:
    cells of rows after the last one and, if pieces are padded, codes after their last unit."""
    carray(pointer(scratch.cells, _U8), (_CELLS,))[:] = 0
    if is_padded:
        carray(pointer(scratch.wide, _U8), (2 * _WIDE_BLOCK,))[:] = 0


@ordered
def _describe_block(w: Any, rows: int) -> Any:
    step_units = count_step_units(w)
    steps = -(-w.units // step_units)
    depth = w.wide_unit // WIDE_ROW * min(w.units, step_units)
    wide_bytes = steps * depth * WIDE_ROW
    pieces = 1 if rows <= _SINGLE_PIECE_ROWS else min(_MAX_PIECES, max(1, _BLOCK_BYTES // wide_bytes))
    return _BlockShape(pieces, w.units * w.unit_bytes + w.scale_bytes, wide_bytes, steps, depth)


@ordered
def _write_shapes(memory: int, rows: int, depth: int) -> None:
    """Write the tile configuration for `rows` (1 to TILE_ROWS) rows of x and `depth` pairs or quads
    per step."""
    carray(pointer(memory, _U8), (SHAPES_BYTES,))[:] = 0
    carray(pointer(memory, _U8), (1,))[0] = 1
    widths = carray(pointer(memory + _WIDTHS_AT, _U16), (_NUM_SHAPES,))
    heights = carray(pointer(memory + _ROWS_AT, _U8), (_NUM_SHAPES,))
    for tile in range(VECTORS):
        widths[tile], heights[tile] = ROW_BYTES, rows
    widths[X], heights[X] = 4 * depth, rows
    for tile in range(WEIGHTS, WEIGHTS + NUM_WEIGHTS):
        widths[tile], heights[tile] = ROW_BYTES, depth


@ordered
def _widen(w: Any, block: Any, to: int, at: int, first: int, following: int, element: Any) -> None:
    """Widen the block that begins with piece `first`, at an address."""
    pieces = count_pieces(w)
    for i in range(min(block.pieces, pieces - first)):
        place = at + i * block.stored_bytes
        ahead = find_ahead(w, place, first + i, pieces, following)
        prefetch_lines(ahead, w.scale_bytes)
        codes, soon = place + w.scale_bytes, ahead + w.scale_bytes
        wide = to + i * block.wide_bytes
        units = count_units(w, first + i)
        widen_for_tiles(wide, block.depth * ROW_BYTES, codes, units, w.table, soon, element)


@ordered
def _find_block_scales(w: Any, block: Any, panel: int, first: int, at: int, to: int) -> Any:
    """Return the address of the scales of a block's first piece, and the distance of those of others."""
    count = min(block.pieces, count_pieces(w) - first)
    scales = at
    for i in range(count):
        place = at + i * block.stored_bytes
        scales = find_scales(w, panel, first + i, place, to + i * 2 * PLANE, w.centre)
    is_stored = scales == at + (count - 1) * block.stored_bytes
    return (at, block.stored_bytes) if is_stored else (to, 2 * PLANE)


@ordered
def multiply_panel(
    w: Any,
    x: Any,
    rows: int,
    panel: int,
    following: int,
    y: int,
    pitch: int,
    scratch: Any,
    configured: int,
    element: Any,
) -> int:
    """Write the product of rows of x and a panel to y, whose rows are `pitch` numbers apart. The thread's
    next panel is `following`. Return the number of rows for which tiles are configured."""
    block = _describe_block(w, rows)
    pieces = count_pieces(w)
    wide = scratch.wide
    next_wide = scratch.wide + _WIDE_BLOCK
    at = w.panels + panel * panel_bytes(w)
    is_whole = w.out_features - panel * COLUMNS >= COLUMNS
    _widen(w, block, wide, at, 0, following, element)
    for first in range(0, pieces, block.pieces):
        count = min(block.pieces, pieces - first)
        scales, scale_bytes = _find_block_scales(w, block, panel, first, at, scratch.scales)
        at += count * block.stored_bytes
        # The next block is widened first, because tiles cannot be loaded from memory that is just written.
        if first + count < pieces:
            _widen(w, block, next_wide, at, first + count, following, element)
        zeros = find_zeros(w, panel, first)
        after = first * x.piece_bytes
        for row in range(0, rows, TILE_ROWS):
            height = min(TILE_ROWS, rows - row)
            if height != configured:
                _write_shapes(scratch.tiles, height, block.depth)
                configure(scratch.tiles)
                configured = height
            sums = scratch.sums + row * WIDE_ROW
            is_done = first + count == pieces and is_whole and height == TILE_ROWS
            out = (y + 4 * (row * pitch + panel * COLUMNS), 4 * pitch) if is_done else (sums, WIDE_ROW)
            begin = x.rows + row * w.row_bytes + after
            of_rows = (x.sums + 4 * row + after, x.scales + 4 * row + after, x.piece_bytes)
            sources = (begin, x.piece_bytes, w.row_bytes, wide, count, block.steps, block.depth * ROW_BYTES)
            compute_cells(scratch.tiles, scratch.cells, *sources, element)
            given = (scratch.cells, count, *of_rows, scales, scale_bytes, w.has_offsets, zeros)
            add_block(height, first == 0, sums, *out, *given, element)
        wide, next_wide = next_wide, wide
    done = rows // TILE_ROWS * TILE_ROWS if is_whole else 0
    copy_sums(scratch.sums + done * WIDE_ROW, rows - done, y + 4 * done * pitch, pitch, w.out_features, panel)
    return configured


@ordered
def multiply_panel_by_few(
    w: Any, x: Any, rows: int, panel: int, following: int, y: int, pitch: int, scratch: Any, element: Any
) -> None:
    """Write the product of at most FEW_ROWS rows of x and a panel to y. See `multiply_panel`."""
    carray(pointer(scratch.sums, _F32), (rows * COLUMNS,))[:] = np.float32(0)
    at = w.panels + panel * panel_bytes(w)
    pieces = count_pieces(w)
    for piece in range(pieces):
        units = count_units(w, piece)
        ahead = find_ahead(w, at, piece, pieces, following)
        prefetch_lines(ahead, w.scale_bytes)
        after = piece * x.piece_bytes
        scales = find_scales(w, panel, piece, at, scratch.scales, w.centre)
        codes, soon = at + w.scale_bytes, ahead + w.scale_bytes
        given = (codes, w.table, units, count_step_units(w), soon, element)
        multiply_few_rows(rows, scratch.cells, x.rows + after, w.row_bytes, *given)
        zeros = find_zeros(w, panel, piece)
        add_cells(scratch.sums, scratch.cells, rows, x.sums + after, scales, w.has_offsets, zeros)
        at += units * w.unit_bytes + w.scale_bytes
    copy_sums(scratch.sums, rows, y, pitch, w.out_features, panel)
