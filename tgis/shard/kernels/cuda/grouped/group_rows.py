"""Groups the rows of a step, by adapter or by expert, and cuts each group into tiles. The host knows neither
the groups nor their sizes."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, GROUPS = 1024, 512  # per iteration of a program
NUM_WARPS = 4

_ROWS, _GROUPS = tl.constexpr(ROWS), tl.constexpr(GROUPS)


class RowTiles(NamedTuple):
    """Rows in the order of their groups, and tiles of rows of one group."""

    order: Tensor  # int32 [num_rows], rows sorted by group, then by number; then zeros for rows of no group
    tiles: Tensor  # int32 [count_tiles(...), 3]: group, first index in `order`, number of rows; then zeros


def count_tiles(num_rows: int, num_groups: int, tile: int) -> int:
    """Return the maximum number of tiles."""
    return num_rows // tile + min(num_rows, num_groups)


@triton.jit(do_not_specialize=["num_rows"])
def count_rows(groups, counts, num_rows):
    """Count the rows of group `program_id(0)`."""
    group = tl.program_id(0)
    total = 0
    for first in range(0, num_rows, _ROWS):
        row = first + tl.arange(0, _ROWS)
        total += tl.sum((tl.load(groups + row, mask=row < num_rows, other=-1) == group).to(tl.int32))
    tl.store(counts + group, total)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "num_tiles"])
def place_rows(groups, counts, order, tiles, num_rows, num_groups, num_tiles, TILE: tl.constexpr):
    """Write the rows and tiles of group `program_id(0)`. The last group's program also writes the zeros."""
    group = tl.program_id(0)
    begin = 0  # number of rows of earlier groups
    tile_begin = 0
    for first in range(0, num_groups, _GROUPS):
        other = first + tl.arange(0, _GROUPS)
        count = tl.load(counts + other, mask=other < group, other=0)
        begin += tl.sum(count)
        tile_begin += tl.sum(tl.cdiv(count, TILE))
    placed = begin
    for first in range(0, num_rows, _ROWS):
        row = first + tl.arange(0, _ROWS)
        is_own = (tl.load(groups + row, mask=row < num_rows, other=-1) == group).to(tl.int32)
        tl.store(order + placed + tl.cumsum(is_own) - 1, row, mask=is_own != 0)
        placed += tl.sum(is_own)
    num_own = placed - begin
    num_own_tiles = tl.cdiv(num_own, TILE)
    for first in range(0, num_own_tiles, _GROUPS):
        nth = first + tl.arange(0, _GROUPS)
        at = tiles + 3 * (tile_begin + nth)
        is_tile = nth < num_own_tiles
        tl.store(at, group, mask=is_tile)
        tl.store(at + 1, begin + nth * TILE, mask=is_tile)
        tl.store(at + 2, tl.minimum(num_own - nth * TILE, TILE), mask=is_tile)
    if group == num_groups - 1:
        for first in range(placed, num_rows, _ROWS):
            row = first + tl.arange(0, _ROWS)
            tl.store(order + row, 0, mask=row < num_rows)
        for first in range(3 * (tile_begin + num_own_tiles), 3 * num_tiles, _ROWS):
            word = first + tl.arange(0, _ROWS)
            tl.store(tiles + word, 0, mask=word < 3 * num_tiles)


@triton.jit
def read_tile(order, tiles, tile, TILE: tl.constexpr):
    """Return the group of a tile, and [TILE] each: indices in `order`, which of them are rows, and the
    rows."""
    nth = tl.arange(0, TILE)
    is_row = nth < tl.load(tiles + 3 * tile + 2)
    place = tl.load(tiles + 3 * tile + 1) + nth
    row = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    return tl.load(tiles + 3 * tile).to(tl.int64), place, is_row, row


def launch(groups: Tensor, num_groups: int, tile: int) -> RowTiles:
    """Group rows by their group's number, int32 [num_rows]; -1: none. Tiles have at most `tile` rows."""
    num_rows = len(groups)
    num_tiles = count_tiles(num_rows, num_groups, tile)
    counts, order, tiles = (
        torch.empty(shape, dtype=torch.int32, device=groups.device)
        for shape in ((num_groups,), (num_rows,), (num_tiles, 3))
    )
    if num_rows:
        count_rows[(num_groups,)](groups, counts, num_rows, num_warps=NUM_WARPS)
        sizes = num_rows, num_groups, num_tiles
        place_rows[(num_groups,)](groups, counts, order, tiles, *sizes, TILE=tile, num_warps=NUM_WARPS)
    return RowTiles(order, tiles)


def plain(groups: Tensor, num_groups: int, tile: int) -> RowTiles:
    device = groups.device
    num_rows = len(groups)
    numbers = torch.arange(num_groups, device=device)
    counts = (groups.unsqueeze(0) == numbers.unsqueeze(1)).sum(1)  # [num_groups]
    ends = counts.cumsum(0)
    order = torch.where(groups < 0, num_groups, groups).argsort(stable=True)
    order = torch.where(torch.arange(num_rows, device=device) < ends[-1:], order, 0)
    tile_counts = (counts + tile - 1) // tile
    tile_ends = tile_counts.cumsum(0)
    nth = torch.arange(count_tiles(num_rows, num_groups, tile), device=device)
    group = torch.searchsorted(tile_ends, nth, right=True).clamp(max=num_groups - 1)
    offset = (nth - (tile_ends - tile_counts)[group]) * tile
    sizes = (counts[group] - offset).clamp(max=tile)
    tiles = torch.stack([group, (ends - counts)[group] + offset, sizes], 1)
    is_tile = (nth < tile_ends[-1:]).unsqueeze(1)
    return RowTiles(order.int(), torch.where(is_tile, tiles, 0).int())
