"""Rounding to integers of few bits with a scale and an offset per group. A search tries several ranges of
values, the group's own range and narrower ones. For each, it fits scale and offset by linear regression of
the weights on their codes, and it keeps the fit with the least squared error. Errors of columns count by
their importance (`quant/importance.py`), which is 1 if it is unknown. The order of sums is fixed, so that
compiled versions have the same bits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.quant.schemes.rounding import TINY, pad_groups

RANGES = (1.0, 0.95, 0.9, 0.85)
"""Widths of the ranges that are tried, relative to the group's own range."""
_CHUNK = 1 << 17  # weights per pass, so that operands and results fit a core's cache


class _Scratch(NamedTuple):
    """Memory of a pass, [group, num_groups] each, because allocating it would take most of the time."""

    x: Tensor
    weighted: Tensor  # x times importance
    importance: Tensor
    codes: Tensor
    weighted_codes: Tensor
    products: Tensor


def round_with_offsets(weights: Tensor, layout: CodeLayout, importance: Tensor | None = None) -> Codes:
    """Round weights [num_rows, num_columns] of any float type to signed codes. A group that contains infinity
    or NaN has scale NaN. The last group of a row is padded with the row's last weight, without importance."""
    num_rows, num_columns = weights.shape
    group = layout.group or num_columns
    weights = pad_groups(weights, group, "replicate")
    groups = weights.reshape(-1, group)
    by_group = pad_importance(importance, num_columns, group).view(-1, group)
    values = torch.empty(groups.shape, dtype=torch.int8)
    scales, offsets = torch.empty(2, len(groups))
    count = max(1, _CHUNK // group)
    memory = torch.empty(len(_Scratch._fields), group, min(count, len(groups)))
    for first in range(0, len(groups), count):
        chunk = groups[first : first + count]
        part = slice(first, first + len(chunk))
        # Groups are columns here, so that sums over a group are vectorised.
        scratch = _Scratch(*memory.flatten(1)[:, : chunk.numel()].view(-1, group, len(chunk)))
        scratch.x.copy_(chunk.T)
        scratch.importance.copy_(by_group[torch.arange(first, first + len(chunk)) % len(by_group)].T)
        scales[part], offsets[part] = _search(scratch, layout.bits)
        values[part] = scratch.codes.T
    width = weights.shape[1]
    rows = values.view(num_rows, width)[:, :num_columns].contiguous()
    scales, offsets = (each.view(num_rows, width // group) for each in (scales, offsets))
    return Codes(layout, rows, scales, offsets=offsets)


def pad_importance(importance: Tensor | None, num_columns: int, group: int) -> Tensor:
    """Return importance, float32, of all columns of whole groups."""
    padding = -num_columns % group
    if importance is None:
        return torch.ones(num_columns + padding)
    return F.pad(importance.float(), (0, padding))


def _search(s: _Scratch, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and offsets, rounded to float16, of groups `s.x`, and write their codes to `s.codes`."""
    x = s.x
    low, high = x.amin(0), x.amax(0)
    middle = (low + high) / 2
    count = _fold(s.products.copy_(s.importance)).clone()
    torch.mul(x, s.importance, out=s.weighted)
    total = _fold(s.products.copy_(s.weighted)).clone()
    is_finite = (high - low).isfinite() & total.isfinite()
    least_error = torch.full_like(low, torch.inf)
    scale = torch.zeros_like(low)
    offset = middle
    for width in RANGES:
        step = (high - low) * (width / ((1 << bits) - 1))
        # The range of codes is symmetric around -1/2.
        _round(x, step, middle + step / 2, bits, s.codes)
        error, *fit = _fit(s, count, total / count)
        is_better = error < least_error
        least_error = torch.where(is_better, error, least_error)
        scale, offset = (torch.where(is_better, *pair) for pair in zip(fit, (scale, offset), strict=True))
    is_zero = torch.maximum(low.abs(), high.abs()) < TINY
    scale, offset = (torch.where(is_zero, 0.0, each).half().float() for each in (scale, offset))
    _round(x, scale, offset, bits, s.codes)
    return torch.where(is_finite & offset.isfinite(), scale, torch.nan), offset


def _round(x: Tensor, scale: Tensor, offset: Tensor, bits: int, codes: Tensor) -> None:
    """Write the codes nearest to x, as floats. Codes of groups with scale 0 are 0."""
    bound = 1 << (bits - 1)
    torch.sub(x, offset, out=codes).mul_(torch.where(scale > 0, 1 / scale, 0.0))
    codes.round_().clamp_(-bound, bound - 1)


def _fit(s: _Scratch, count: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit scale and offset of each group by least squares. Return the squared error minus that of the group's
    mean, the scale and the offset. `count` is the sum of importance."""
    torch.mul(s.codes, s.importance, out=s.weighted_codes)
    centre = _fold(s.products.copy_(s.weighted_codes)) / count
    spread = _fold(torch.mul(s.weighted_codes, s.codes, out=s.products)) - count * centre * centre
    shared = _fold(torch.mul(s.weighted, s.codes, out=s.products)) - count * mean * centre
    scale = torch.where(spread > 0, shared / spread, 0.0)
    return -shared * scale, scale, mean - scale * centre


def _fold(x: Tensor) -> Tensor:
    """Return the sum of the rows of x: the upper half of the rows is added to the lower half until one row is
    left. This overwrites x."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        x[: len(x) - half].add_(x[half:])
        x = x[:half]
    return x[0]
