"""Compiled functions that round weights, with the same results as the portable ones."""

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.kernels.cpu.rounding.kernels import NEAREST, SEARCH
from tgis.shard.kernels.cpu.rounding.vectors import LANES
from tgis.shard.quant.schemes.int4 import LAYOUT as INT4
from tgis.shard.quant.schemes.portable_rounder import PortableRounder
from tgis.shard.quant.schemes.rounding import pad_groups
from tgis.shard.quant.schemes.search import pad_importance


class CpuRounder(PortableRounder):
    """`Rounder` by compiled kernels."""

    def round_with_offsets(
        self, weights: Tensor, layout: CodeLayout, importance: Tensor | None = None
    ) -> Codes:
        if layout != INT4 or not weights.numel():
            return super().round_with_offsets(weights, layout, importance)
        assert layout.group is not None
        by_column = pad_importance(importance, weights.shape[1], layout.group)
        padded = pad_groups(weights, layout.group, "replicate")
        values, scales = _allocate(padded, layout.group)
        offsets = torch.empty_like(scales)
        addresses = (each.data_ptr() for each in (padded, by_column, values, scales, offsets))
        SEARCH[padded.dtype].parallel(scales.numel(), scales.shape[1], *addresses)
        return Codes(layout, _cut(values, weights), scales, offsets=offsets)

    def round_to_integers(self, weights: Tensor, layout: CodeLayout) -> Codes:
        if (layout.group is not None and layout.group % LANES) or not weights.numel():
            return super().round_to_integers(weights, layout)
        padded = pad_groups(weights, layout.group or LANES, "constant")
        group = layout.group or padded.shape[1]
        values, scales = _allocate(padded, group)
        bound = 1 << (layout.bits - 1)
        addresses = (each.data_ptr() for each in (padded, values, scales))
        NEAREST[padded.dtype].parallel(scales.numel(), group, bound, bound - 1, *addresses)
        return Codes(layout, _cut(values, weights), scales)


def _allocate(padded: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return memory for codes and scales."""
    values = torch.empty(padded.shape, dtype=torch.int8)
    return values, torch.empty(len(padded), padded.shape[1] // group)


def _cut(values: Tensor, weights: Tensor) -> Tensor:
    """Return the codes without padding."""
    return values[:, : weights.shape[1]].contiguous()
