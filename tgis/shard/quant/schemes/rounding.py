"""Rounding of weights to codes. Groups of adjacent values of a row, or whole rows, share a scale. A group
that contains infinity or NaN has scale NaN; a group with only tiny magnitudes becomes zeros."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes

# Rounds weights of any float type, [num_rows, num_columns]. Groups begin at the first column.
Rounding = Callable[[Tensor, CodeLayout], Codes]

TINY = 1e-30  # groups whose largest magnitude is smaller become zeros
_ZERO = torch.tensor(0.0)
_ONE = torch.tensor(1.0)
_NAN = torch.tensor(float("nan"))


def round_to_integers(weights: Tensor, layout: CodeLayout) -> Codes:
    """Round to integers of `layout.bits` bits, half to even. A scale is the group's largest magnitude divided
    by the largest integer."""
    groups, magnitudes, largest = _split(weights, layout)
    bound = 1 << (layout.bits - 1)
    steps = torch.tensor(bound - 1.0)
    values = torch.mul(groups, _divide(steps, largest), out=magnitudes).round_().clamp_(-bound, bound - 1)
    return _join(weights, layout, values.to(layout.dtype), largest / steps)


def round_to_floats(weights: Tensor, layout: CodeLayout) -> Codes:
    """Round to 8-bit floats, half to even. A scale is the group's largest magnitude divided by the largest
    float."""
    groups, magnitudes, largest = _split(weights, layout)
    largest_float = torch.tensor(torch.finfo(layout.dtype).max)
    scales = largest / largest_float
    values = torch.div(groups, torch.where(scales > 0, scales, _ONE), out=magnitudes)
    return _join(weights, layout, values.to(layout.dtype), scales)


def round_to_table(weights: Tensor, layout: CodeLayout) -> Codes:
    """Round to the nearest values of `layout.table`, which are within -1 to 1; ties go to the lower value. A
    scale is the group's largest magnitude."""
    groups, magnitudes, largest = _split(weights, layout)
    table, order = torch.tensor(layout.table).sort(stable=True)
    values = torch.mul(groups, _divide(_ONE, largest), out=magnitudes)
    places = torch.zeros(values.shape, dtype=torch.uint8)
    for bound in (table[:-1] + table[1:]) / 2:  # faster than a binary search
        places += values > bound
    codes = order.to(layout.dtype)[places.int()]
    return _join(weights, layout, codes, largest)


def pad_groups(weights: Tensor, group: int, mode: Literal["constant", "replicate"]) -> Tensor:
    """Return weights, contiguous, whose rows are padded to whole groups with zeros or with their last
    values."""
    padding = -weights.shape[1] % group
    if not padding:
        return weights.contiguous()
    return F.pad(weights.unsqueeze(0), (0, padding), mode=mode)[0]


def _split(weights: Tensor, layout: CodeLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights and magnitudes, float32 [num_rows, num_groups, group], and the groups' largest
    magnitudes, [num_rows, num_groups, 1]. The last group is zero-padded."""
    group = layout.group or weights.shape[1]
    padded = pad_groups(weights, group, "constant").float()
    groups = padded.view(len(weights), padded.shape[1] // group, group)
    magnitudes = groups.abs()
    largest = magnitudes.amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, _NAN)
    return groups, magnitudes, torch.where(largest < TINY, _ZERO, largest)


def _divide(number: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest > 0, number / largest, _ZERO)


def _join(weights: Tensor, layout: CodeLayout, values: Tensor, scales: Tensor) -> Codes:
    return Codes(layout, values.flatten(1)[:, : weights.shape[1]].contiguous(), scales.squeeze(-1))
