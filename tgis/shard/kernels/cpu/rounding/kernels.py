"""Compiled kernels that round the groups of a matrix."""

from typing import Any

from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, operands
from tgis.shard.kernels.cpu.jit.scalar_math import ELEMENTS
from tgis.shard.kernels.cpu.rounding.nearest import round_group
from tgis.shard.kernels.cpu.rounding.search import GROUP, search_group
from tgis.shard.kernels.cpu.rounding.vectors import LANES

_UNIT = 1 << 14  # approximate number of weights of a unit of work
_GROUPS = _UNIT // GROUP


def _search_kernel(element: Any) -> Kernel:
    width = element.itemsize  # bytes

    def search(args: Any) -> None:
        num_groups, groups_per_row, x, importance, codes, scales, offsets = operands(args, 1, 7)
        first = next_unit(args) * _GROUPS
        while first < num_groups:
            for i in range(first, min(num_groups, first + _GROUPS)):
                at = i * GROUP
                own = importance + 4 * GROUP * (i % groups_per_row)
                search_group(x + at * width, own, codes + at, scales + 4 * i, offsets + 4 * i, element)
            first = next_unit(args) * _GROUPS

    return Kernel(search)


def _nearest_kernel(element: Any) -> Kernel:
    width = element.itemsize

    def round_to_nearest(args: Any) -> None:
        num_groups, group, bound, num_steps, x, codes, scales = operands(args, 1, 7)
        per_unit = max(1, _UNIT // group)
        first = next_unit(args) * per_unit
        while first < num_groups:
            for i in range(first, min(num_groups, first + per_unit)):
                at = i * group
                to = codes + at
                scale = scales + 4 * i
                round_group(x + at * width, group // LANES, bound, num_steps, to, scale, element)
            first = next_unit(args) * per_unit

    return Kernel(round_to_nearest)


SEARCH = {dtype: _search_kernel(element) for dtype, element in ELEMENTS.items()}
"""Kernels that search scales and offsets of groups of GROUP weights, by the weights' type."""

NEAREST = {dtype: _nearest_kernel(element) for dtype, element in ELEMENTS.items()}
"""Kernels that round groups of a multiple of LANES weights to the nearest integers, by the weights' type."""
