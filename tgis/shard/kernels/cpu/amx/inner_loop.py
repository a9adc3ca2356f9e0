"""Products of up to two tiles of rows with a panel of weights, and the configuration of the tiles.

A row of a panel has PANEL elements of 4 bytes: pairs of bfloat16 or quads of bytes. Tiles 0 to 3 hold sums, 4
and 5 hold rows of x, 6 and 7 hold the halves of a panel."""

from typing import Any

import numpy as np
from numba import carray, types

from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.amx.instructions import ELEMENT_BYTES, ROW_BYTES, SHAPES_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered, pointer
from tgis.shard.kernels.cpu.jit.llvm import I64

ROWS = 2 * TILE_ROWS  # maximum rows of a product
PANEL = 2 * ROW_BYTES // ELEMENT_BYTES  # columns of a panel
PANEL_ROW = 2 * ROW_BYTES  # bytes
DEPTH = TILE_ROWS  # maximum rows of a panel per instruction
SUMS_BYTES = ROWS * PANEL_ROW  # bytes of the sums of a product
MEMORY_BYTES = SHAPES_BYTES if instructions.INSTRUCTIONS is None else instructions.INSTRUCTIONS.memory_bytes

PAIRS, QUADS = np.uint32(0), np.uint8(0)  # values of the types that stand for pairs and quads
_PAIRS = types.uint32
_U8, _U16 = np.uint8(0), np.uint16(0)
_SUMS, _X, _WEIGHTS = 0, 4, 6  # first tile of each operand
_AHEAD = 3 * DEPTH * PANEL_ROW  # bytes between the weights that are multiplied and those to prefetch
_PALETTE = 1
_WIDTHS_AT, _ROWS_AT, _NUM_SHAPES = 16, 48, 16  # offsets in the configuration, and its number of tiles


def open_tiles(b: Any, memory: Any) -> instructions.Tiles:
    assert instructions.INSTRUCTIONS is not None
    return instructions.INSTRUCTIONS(b, memory)


@ordered
def write_shapes(memory: int, rows: int, depth: int) -> None:
    """Write the tile configuration for `rows` (1 to ROWS) rows of x and `depth` (1 to DEPTH) rows of a
    panel."""
    carray(pointer(memory, _U8), (SHAPES_BYTES,))[:] = 0
    carray(pointer(memory, _U8), (1,))[0] = _PALETTE
    widths = carray(pointer(memory + _WIDTHS_AT, _U16), (_NUM_SHAPES,))
    heights = carray(pointer(memory + _ROWS_AT, _U8), (_NUM_SHAPES,))
    for half in range(2):
        height = max(0, min(rows - half * TILE_ROWS, TILE_ROWS))
        if height > 0:
            for tile in (_SUMS + 2 * half, _SUMS + 2 * half + 1, _X + half):
                widths[tile], heights[tile] = ROW_BYTES, height
            widths[_X + half] = ELEMENT_BYTES * depth
        widths[_WEIGHTS + half], heights[_WEIGHTS + half] = ROW_BYTES, depth


@llvm_function()
def configure(b: Any, memory: Any) -> None:
    open_tiles(b, memory).configure()


@llvm_function()
def release(b: Any, memory: Any) -> None:
    open_tiles(b, memory).release()


def _begin_sums(
    b: Any, tiles: instructions.Tiles, cells: list[tuple[int, int, int]], sums: Any, is_first: Any
) -> None:
    """Clear the tiles of sums if `is_first`, or else load them. A cell has the half of the rows, the half of
    the panel, and the tile."""
    with b.if_else(b.icmp_signed("!=", is_first, I64(0))) as (first, later):
        with first:
            for *_, tile in cells:
                tiles.clear(tile)
        with later:
            for half, v, tile in cells:
                place = b.add(sums, I64(half * TILE_ROWS * PANEL_ROW + v * ROW_BYTES))
                tiles.load(tile, place, I64(PANEL_ROW))


def _make_product(num_halves: int, prefetches: bool = False) -> Any:
    """Build a kernel function that adds the product of rows of x, in `num_halves` tiles, and `count` tiles of
    a panel to sums, [rows, PANEL] of 4 bytes, and stores the result in `out`. With `prefetches`, the tiles
    that follow in memory are prefetched.

    If `is_first`, the sums start at 0. `memory` to `panel` are addresses or strides: `out_stride` and
    `stride` are the bytes between rows of out and x."""

    @llvm_function()
    def multiply(
        b: Any,
        memory: Any,
        sums: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        stride: Any,
        panel: Any,
        count: Any,
        is_first: Any,
        element: Any,
    ) -> None:
        tiles = open_tiles(b, memory)
        add = tiles.add_pairs if element == _PAIRS else tiles.add_quads
        cells = [(half, v, _SUMS + 2 * half + v) for half in range(num_halves) for v in range(2)]
        rows = [b.add(x, b.mul(stride, I64(half * TILE_ROWS))) for half in range(num_halves)]
        _begin_sums(b, tiles, cells, sums, is_first)

        def add_tiles(k: Any, _: list[Any]) -> list[Any]:
            weights = b.add(panel, b.mul(k, I64(DEPTH * PANEL_ROW)))
            if prefetches:
                for line in range(DEPTH * PANEL_ROW // ROW_BYTES):
                    llvm.prefetch(b, weights, I64(_AHEAD + line * ROW_BYTES))
            for v in range(2):
                tiles.load(_WEIGHTS + v, b.add(weights, I64(v * ROW_BYTES)), I64(PANEL_ROW))
            for half, row in enumerate(rows):
                tiles.load(_X + half, b.add(row, b.mul(k, I64(ROW_BYTES))), stride)
            for half, v, tile in cells:
                add(tile, _X + half, _WEIGHTS + v)
            return []

        llvm.loop(b, count, [], add_tiles)
        for half, v, tile in cells:
            below = b.mul(out_stride, I64(half * TILE_ROWS))
            tiles.store(tile, b.add(out, b.add(below, I64(v * ROW_BYTES))), out_stride)

    return multiply


_multiply_one, _multiply_two = _make_product(1), _make_product(2)
_multiply_and_prefetch = _make_product(2, prefetches=True)


@ordered
def multiply(
    memory: int,
    sums: int,
    out: int,
    out_stride: int,
    x: int,
    stride: int,
    rows: int,
    panel: int,
    count: int,
    is_first: bool,
    element: Any,
    prefetches: bool = False,
) -> None:
    """Run the function of `_make_product` for the configured number of rows. One tile of rows reads weights
    as fast as the memory allows without prefetching."""
    if rows > TILE_ROWS and prefetches:
        _multiply_and_prefetch(memory, sums, out, out_stride, x, stride, panel, count, is_first, element)
    elif rows > TILE_ROWS:
        _multiply_two(memory, sums, out, out_stride, x, stride, panel, count, is_first, element)
    else:
        _multiply_one(memory, sums, out, out_stride, x, stride, panel, count, is_first, element)


@ordered
def copy_sums(sums: int, rows: int, columns: int, out: int, stride: int, number: Any) -> None:
    """Copy the first columns of sums, which have `number`'s type, to rows that are `stride` bytes apart."""
    for r in range(rows):
        source = carray(pointer(sums + r * PANEL_ROW, number), (PANEL,))
        to = carray(pointer(out + r * stride, number), (columns,))
        for c in range(columns):
            to[c] = source[c]
