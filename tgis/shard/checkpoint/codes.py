"""The canonical form of quantized weights. Every format of checkpoints is read into it, every scheme that
rounds weights when they are read gives it, and a platform packs it into products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScaleType = Literal["float32", "float16", "bfloat16", "int8", "uint4"]
_SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint4": 0.5}


@dataclass(frozen=True)
class CodeLayout:
    """Kind of codes, as far as a platform must know it to have products for them."""

    dtype: torch.dtype  # of `Codes.values`
    bits: int  # used of a value
    group: int | None  # adjacent columns that share a scale; None if all do, or if `Codes.group_of` is given
    has_zeros: bool = False
    is_reordered: bool = False  # `Codes.group_of` is given
    table: tuple[float, ...] = ()  # numbers that values are indices of; without them, values are numbers
    rounds_activations: bool = False  # products round what they multiply to integers of `bits` bits
    has_offsets: bool = False
    scale_type: ScaleType = "float32"
    """Smallest type that holds scales and offsets without loss. Those of integers are multiples of
    `Codes.factors`."""
    groups_per_factor: int | None = None  # adjacent groups that share factors
    first_group: int = 0  # place of the first column's group among those that share its factors

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a value and its part of a scale, an offset and factors, as products hold them, for wide
        matrices. They hold a scale for each 128 columns of a larger group, and values with zeros or a table
        and of fewer bits than 4 as 4 bits."""
        bits = max(self.bits, 4) if self.scale_type == "float32" else self.bits
        group, planes = min(self.group or 128, 128), 1 + self.has_offsets
        scales = planes * _SCALE_BYTES[self.scale_type] / group
        factors = 4 * planes / (group * self.groups_per_factor) if self.groups_per_factor else 0
        return bits / 8 + scales + factors


@dataclass(frozen=True, eq=False)
class Codes:
    """Part of a quantized matrix, [num_rows, num_columns]. Column k is in group `group_of[k]`, or else in
    group k // `layout.group`, and a weight is (value - zero) * scale + offset with its row's and group's
    numbers."""

    layout: CodeLayout
    values: Tensor  # [num_rows, num_columns]
    scales: Tensor  # float32 [num_rows, num_groups]
    zeros: Tensor | None = None  # float32 [num_rows, num_groups]
    group_of: Tensor | None = None  # int64 [num_columns]
    offsets: Tensor | None = None  # float32 [num_rows, num_groups]
    factors: Tensor | None = None
    """float32 [num_rows, num_factors, 1 or 2]: numbers whose integer multiples the scales and offsets are.
    The factors of group g are in place (g + `layout.first_group`) // `layout.groups_per_factor`."""

    def dequantize(self) -> Tensor:
        """Return the weights, float32 [num_rows, num_columns]."""
        if self.layout.table:
            indices = self.values.reshape(-1).int()
            weights = torch.tensor(self.layout.table).index_select(0, indices).view(self.values.shape)
        else:
            weights = self.values.to(torch.float32, copy=True)
        if self.zeros is not None:
            self._change(weights, self.zeros, Tensor.sub_)
        self._change(weights, self.scales, Tensor.mul_)
        if self.offsets is not None:
            self._change(weights, self.offsets, Tensor.add_)
        return weights

    def _change(self, weights: Tensor, per_group: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Apply an in-place operation to weights, [num_rows, num_columns], and their groups' numbers."""
        if self.group_of is not None:
            change(weights, per_group.index_select(1, self.group_of))
            return
        group = self.layout.group or max(1, weights.shape[1])
        num_whole = weights.shape[1] // group
        whole, rest = weights[:, : num_whole * group], weights[:, num_whole * group :]
        change(whole.view(len(whole), num_whole, group), per_group[:, :num_whole].unsqueeze(-1))
        change(rest, per_group[:, num_whole : num_whole + 1])


def join_rows(parts: Sequence[Codes]) -> Codes:
    """Concatenate parts of one layout and order of columns."""
    first = parts[0]
    assert all(part.layout == first.layout for part in parts)
    return Codes(
        first.layout,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        _join([part.zeros for part in parts]),
        first.group_of,
        _join([part.offsets for part in parts]),
        _join([part.factors for part in parts]),
    )


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None
