"""Improves rounded matrices by coordinate descent on the squared error of their outputs, which depends on the
Hessian of the inputs. GPTQ chooses each code before it knows the errors of later columns, and each scale
before it knows the codes; here, both are chosen again while all others are given."""

import torch
from torch import Tensor

from tgis.shard.quantize.group_codes import Grid

SWEEPS = 3  # further ones change little


def refine(
    columns: Tensor, hessian: Tensor, codes: Tensor, grids: list[Grid], length: int
) -> tuple[Tensor, list[Grid]]:
    """Return better codes and grids for weights `columns`, float64 [num_columns, num_rows], whose groups have
    `length` columns. `codes` has the same shape; `hessian` is float64 [num_columns, num_columns]."""
    codes = codes.clone()
    grids = list(grids)
    groups = [slice(first, first + length) for first in range(0, len(columns), length)]
    rounded = torch.cat([grid.decode(codes[group]) for grid, group in zip(grids, groups, strict=True)])
    gradients = hessian @ (columns - rounded)  # of the error, negative and halved
    for _ in range(SWEEPS):
        for number, group in enumerate(groups):
            before, own = rounded[group].clone(), gradients[group].clone()
            inside = hessian[group, group]
            _improve_codes(rounded[group], own, codes[group], inside, grids[number])
            grids[number] = _improve_scales(own, codes[group], inside, grids[number])
            rounded[group] = grids[number].decode(codes[group])
            gradients.addmm_(hessian[:, group], rounded[group] - before, alpha=-1)
    return codes, grids


def _improve_codes(rounded: Tensor, gradients: Tensor, codes: Tensor, hessian: Tensor, grid: Grid) -> None:
    """Choose the best code of each column of a group in turn. Overwrites all except `hessian` and `grid`."""
    for i in range(len(codes)):
        codes[i] = grid.encode(rounded[i] + gradients[i] / hessian[i, i])
        change = grid.decode(codes[i]) - rounded[i]
        rounded[i] += change
        gradients.addr_(hessian[:, i], change, alpha=-1)


def _improve_scales(gradients: Tensor, codes: Tensor, hessian: Tensor, grid: Grid) -> Grid:
    """Return the grid with the scales of a group that are best for its codes."""
    steps = codes - grid.zeros
    spread = (steps * (hessian @ steps)).sum(0)
    change = (steps * gradients).sum(0) / spread
    return grid.with_scales(torch.where(spread > 0, grid.scales + change, grid.scales))
