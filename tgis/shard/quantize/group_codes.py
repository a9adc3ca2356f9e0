"""Integer codes of a matrix in groups of columns, and the grids of values that they represent."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.quantize.settings import QuantizeSettings

SMALLEST_SCALE = 2.0**-24  # smallest positive float16
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Widths of the ranges that are tried, relative to the range that spans a group's weights."""


class Grid(NamedTuple):
    """Values (code - zero) * scale for codes 0 to `largest`, per row of a matrix. Scales and zeros are
    float64 [num_rows]; scales are rounded to float16, the type in which they are stored."""

    scales: Tensor
    zeros: Tensor
    largest: int

    def encode(self, weights: Tensor) -> Tensor:
        """Return the codes of the values nearest to weights, float64 [..., num_rows]."""
        return (weights / self.scales).round().add(self.zeros).clamp(0, self.largest)

    def decode(self, codes: Tensor) -> Tensor:
        return (codes - self.zeros) * self.scales

    def with_scales(self, scales: Tensor) -> "Grid":
        """Return the grid with other scales, rounded as they are stored."""
        return Grid(scales.half().double().clamp(min=SMALLEST_SCALE), self.zeros, self.largest)


def find_grid(weights: Tensor, importance: Tensor, bits: int, sym: bool) -> Grid:
    """Return the grid with the least error of a group's weights, float64 [group_length, num_rows].

    The error is the sum of squared differences times `importance`, float64 [group_length]. A search tries
    grids that span the weights or a part of their range, then zeros beside that of the best one unless `sym`,
    and for each also the scale that fits its codes best by linear regression."""
    search = _Search(weights, importance, _span(weights, bits, sym))
    span = search.best
    for width in RANGES:
        search.try_grid(span.with_scales(span.scales * width))
    for zeros in () if sym else (search.best.zeros - 1, search.best.zeros + 1):
        search.try_grid(search.best._replace(zeros=zeros.clamp(1, span.largest)))
    return search.best


class _Search:
    """Search for the grid of least error, by row."""

    def __init__(self, weights: Tensor, importance: Tensor, grid: Grid):
        self.best = grid
        self._weights = weights
        self._importance = importance
        self._least = torch.full_like(grid.scales, torch.inf)

    def try_grid(self, tried: Grid) -> None:
        for grid in (tried, _fit_scales(tried, self._weights, self._importance)):
            errors = self._importance @ (self._weights - grid.decode(grid.encode(self._weights))).square_()
            is_better = errors < self._least
            self._least = torch.where(is_better, errors, self._least)
            scales = torch.where(is_better, grid.scales, self.best.scales)
            zeros = torch.where(is_better, grid.zeros, self.best.zeros)
            self.best = Grid(scales, zeros, grid.largest)


def _span(weights: Tensor, bits: int, sym: bool) -> Grid:
    """Return the grid that spans the weights of a group. Zeros are at least 1, because they are stored minus
    one."""
    largest = 2**bits - 1
    if sym:
        scales = weights.abs().amax(0) * 2 / largest
        return Grid(scales, torch.full_like(scales, 2 ** (bits - 1)), largest).with_scales(scales)
    low, high = weights.amin(0).clamp(max=0), weights.amax(0).clamp(min=0)
    scales = (high - low) / largest
    zeros = (-low / scales.clamp(min=SMALLEST_SCALE)).round()
    scales = torch.where(zeros < 1, high / (largest - 1), scales)
    return Grid(scales, zeros.clamp(1, largest), largest).with_scales(scales)


def _fit_scales(grid: Grid, weights: Tensor, importance: Tensor) -> Grid:
    """Return the grid with the scales of least error for the codes that `grid` gives the weights."""
    steps = grid.encode(weights).sub_(grid.zeros)
    spread = importance @ steps.square()
    shared = importance @ steps.mul_(weights)
    return grid.with_scales(torch.where(spread > 0, shared / spread, grid.scales))


@dataclass(frozen=True, eq=False)
class GroupCodes:
    """Codes of a matrix [num_rows, num_columns], transposed as in GPTQ checkpoints."""

    codes: Tensor  # uint8 [num_columns, num_rows]
    scales: Tensor  # float16 [num_groups, num_rows]
    zeros: Tensor  # uint8 [num_groups, num_rows]
    group_of: Tensor  # int64 [num_columns]

    def dequantize(self) -> Tensor:
        """Return the weights, float32 [num_rows, num_columns]. float32 holds them exactly."""
        steps = self.codes.float() - self.zeros.float()[self.group_of]
        return (steps * self.scales.float()[self.group_of]).T.contiguous()


def round_to_nearest(weight: Tensor, settings: QuantizeSettings) -> GroupCodes:
    """Round each weight of a matrix [num_rows, num_columns] by itself."""
    columns = weight.double().T  # [num_columns, num_rows]
    length = settings.group_length(len(columns))
    groups = torch.split(columns, length)
    alike = torch.split(columns.new_ones(len(columns)), length)
    grids = [find_grid(*each, settings.bits, settings.sym) for each in zip(groups, alike, strict=True)]
    codes = [grid.encode(group) for grid, group in zip(grids, groups, strict=True)]
    return assemble(torch.cat(codes), grids, length)


def assemble(codes: Tensor, grids: list[Grid], group_length: int) -> GroupCodes:
    """Convert codes, float64 [num_columns, num_rows], and the grids of their groups to the stored types."""
    return GroupCodes(
        codes.to(torch.uint8),
        torch.stack([grid.scales for grid in grids]).half(),
        torch.stack([grid.zeros for grid in grids]).to(torch.uint8),
        torch.arange(len(codes), device=codes.device) // group_length,
    )
