"""Rows grouped by the kernel in the interpreter and by its twin."""

from collections.abc import Callable
from itertools import groupby

import pytest
import torch

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.program_order import reversed_programs
from tgis.shard.kernels.cuda.grouped import group_rows
from tgis.shard.kernels.cuda.grouped.group_rows import RowTiles, count_tiles

COMPUTE: dict[str, Callable[..., RowTiles]] = {"kernel": interpreted().group_rows, "twin": group_rows.plain}
each_way = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)


def group(groups: list[int], num_groups: int, tile: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the order of the rows, and the tiles, computed one row after the other."""
    order = sorted((g, row) for row, g in enumerate(groups) if g >= 0)
    tiles, first = [], 0
    for number, members in groupby(order, lambda each: each[0]):
        count = len(list(members))
        tiles += [(number, first + at, min(tile, count - at)) for at in range(0, count, tile)]
        first += count
    num_tiles = count_tiles(len(groups), num_groups, tile)
    assert len(tiles) <= num_tiles
    tiles += [(0, 0, 0)] * (num_tiles - len(tiles))
    return [row for _, row in order] + [0] * (len(groups) - len(order)), tiles


CASES = {
    "one row": ([0], 1, 16),
    "no group": ([-1, -1, -1], 4, 16),
    "one group": ([2] * 37, 3, 16),
    "whole tiles": ([1] * 32 + [0] * 16, 2, 16),
    "each its own": (list(range(20))[::-1], 20, 16),
    "few of many groups": ([7, -1, 600, 7, 599, 0], 601, 4),
    "no rows": ([], 3, 16),
}


@each_way
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if "many" in case else []) for case in CASES]
)
def test_cases(case: str, compute: Callable[..., RowTiles]) -> None:
    groups, num_groups, tile = CASES[case]
    actual = compute(torch.tensor(groups, dtype=torch.int32), num_groups, tile)
    order, tiles = group(groups, num_groups, tile)
    assert actual.order.tolist() == order
    assert [tuple(each) for each in actual.tiles.tolist()] == tiles
    assert {each.dtype for each in actual} == {torch.int32}


@each_way
@pytest.mark.parametrize("num_rows", [100, 2500])
def test_random_groups(num_rows: int, compute: Callable[..., RowTiles]) -> None:
    """More rows than a program reads at once."""
    for num_groups, tile in ((3, 32), (40, 16)):
        groups = torch.randint(-1, num_groups, (num_rows,), dtype=torch.int32)
        expected_order, expected_tiles = group(groups.tolist(), num_groups, tile)
        with reversed_programs():
            actual = compute(groups, num_groups, tile)
        assert actual.order.tolist() == expected_order
        assert [tuple(each) for each in actual.tiles.tolist()] == expected_tiles
