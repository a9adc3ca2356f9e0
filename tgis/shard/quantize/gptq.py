"""Rounds a matrix by GPTQ, which minimises the squared error of its outputs: Frantar, Ashkboos, Hoefler,
Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022 (arXiv
2210.17323).

Columns are rounded one after the other. Later columns compensate for the error of each, weighted by the
inverse Hessian of the squared error, 2/n sum x x^T over n inputs x."""

from itertools import pairwise

import torch
from torch import Tensor

from tgis.shard.quantize.group_codes import Grid, GroupCodes, assemble, find_grid
from tgis.shard.quantize.refinement import refine
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

BLOCK = 128  # columns that are rounded before all later columns are updated
LARGER_DAMPINGS = (0.01, 0.1, 1.0)  # tried if the Hessian cannot be inverted with the damping that is set


def solve(weight: Tensor, hessian: Tensor, settings: QuantizeSettings) -> GroupCodes:
    """Round a matrix [num_rows, num_columns], given its inputs' Hessian [num_columns, num_columns].

    Columns whose inputs are all zero become zeros. Raises QuantizeError if the Hessian cannot be inverted."""
    columns = weight.T.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    hessian = hessian.to(torch.float64, copy=True)
    is_dead = hessian.diagonal() == 0
    columns[is_dead] = 0
    hessian.diagonal()[is_dead] = 1
    length = settings.group_length(len(columns))
    damping, codes, grids = round_by_gptq(columns.clone(), hessian, settings)
    hessian.diagonal().add_(damping)
    return assemble(*refine(columns, hessian, codes, grids, length), length)


def round_by_gptq(
    columns: Tensor, hessian: Tensor, settings: QuantizeSettings
) -> tuple[Tensor, Tensor, list[Grid]]:
    """Return what was added to the Hessian's diagonal, the codes of columns, float64 [num_columns, num_rows],
    and the grids of their groups. Overwrites `columns`.

    The grid of a group spans its weights, including updates from earlier columns. With `act_order`, columns
    are rounded in descending order of the Hessian's diagonal, and grids span the original weights."""
    length = settings.group_length(len(columns))
    if not settings.act_order:
        factor, damping = _invert(hessian, settings.percdamp)
        return damping, *_round_columns(columns, factor, length, [], settings)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    groups = zip(torch.split(columns, length), torch.split(hessian.diagonal(), length), strict=True)
    grids = [find_grid(*group, settings.bits, settings.sym) for group in groups]
    ordered = [grids[k // length] for k in order.tolist()]
    factor, damping = _invert(hessian[order][:, order], settings.percdamp)
    ordered_codes, _ = _round_columns(columns[order], factor, len(columns), ordered, settings)
    codes = torch.empty_like(ordered_codes)
    codes[order] = ordered_codes
    return damping, codes, grids


def _round_columns(
    columns: Tensor, factor: Tensor, length: int, given: list[Grid], settings: QuantizeSettings
) -> tuple[Tensor, list[Grid]]:
    """Return the codes of columns, float64 [num_columns, num_rows], and the grids of groups of `length`
    columns. Overwrites `columns`. `given`, if not empty, has the grid of each column. `factor` comes from
    `_invert`."""
    codes = torch.empty_like(columns)
    grids = list[Grid]()
    for begin, end in pairwise(_cut(len(columns), length)):
        if not given and begin % length == 0:
            group = slice(begin, begin + length)
            # The squared error of a column divided by the square of its factor is what rounding it costs.
            importance = factor.diagonal()[group] ** -2
            grids.append(find_grid(columns[group], importance, settings.bits, settings.sym))
        block = columns[begin:end]
        inside = factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            grid = given[begin + i] if given else grids[-1]
            codes[begin + i] = grid.encode(column)
            errors[i] = (column - grid.decode(codes[begin + i])) / inside[i, i]
            block[i + 1 :].addr_(inside[i, i + 1 :], errors[i], alpha=-1)
        columns[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    return codes, grids


def _cut(num_columns: int, length: int) -> list[int]:
    """Return the bounds of blocks. No block crosses the bound of a group."""
    groups = range(0, num_columns, length)
    begins = [k for group in groups for k in range(group, min(group + length, num_columns), BLOCK)]
    return [*begins, num_columns]


def _invert(hessian: Tensor, percdamp: float) -> tuple[Tensor, Tensor]:
    """Return the upper Cholesky factor of the damped Hessian's inverse, and the damping. Row k, divided by
    its diagonal element, holds the weights with which later columns compensate for column k. Damping is
    increased until the Hessian can be inverted. Raises QuantizeError if it cannot."""
    mean = hessian.diagonal().mean()
    for share in (percdamp, *(more for more in LARGER_DAMPINGS if more > percdamp)):
        damped = hessian.clone()
        damping = share * mean
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        factor, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and not failed_too and factor.isfinite().all():
            return factor, damping
    raise QuantizeError("the Hessian of its inputs cannot be inverted: use a larger --percdamp")
