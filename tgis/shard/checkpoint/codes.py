"""Canonical form of quantized weights. Every checkpoint format is read into it, every scheme that rounds
weights at load time produces it, and each platform packs it for its matrix products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScaleType = Literal["float32", "float16", "bfloat16", "int8", "uint4"]
_SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint4": 0.5}


@dataclass(frozen=True)
class CodeLayout:
    """Properties of codes that determine which matrix products a platform can use."""

    dtype: torch.dtype  # of `Codes.values`
    bits: int  # used bits of a value
    group: int | None  # adjacent columns that share a scale; None if all do, or if `Codes.group_of` is set
    has_zeros: bool = False
    is_reordered: bool = False  # `Codes.group_of` is set
    table: tuple[float, ...] = ()  # numbers that the values index; if empty, the values are the numbers
    rounds_activations: bool = False  # products round activations to integers of `bits` bits
    has_offsets: bool = False
    scale_type: ScaleType = "float32"
    """Smallest type that holds scales and offsets without loss. Integer scales and offsets are multiples of
    `Codes.factors`."""
    groups_per_factor: int | None = None  # adjacent groups that share factors
    first_group: int = 0  # index of the first column's group among the groups that share its factors

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight in a wide packed matrix, including its part of a scale, an offset and factors. A
        group of more than 128 columns is stored as several of 128. Values with float32 scales take at least
        4 bits."""
        bits = max(self.bits, 4) if self.scale_type == "float32" else self.bits
        group = min(self.group or 128, 128)
        planes = 1 + self.has_offsets
        scales = planes * _SCALE_BYTES[self.scale_type] / group
        factors = 4 * planes / (group * self.groups_per_factor) if self.groups_per_factor else 0
        return bits / 8 + scales + factors


@dataclass(frozen=True, eq=False)
class Codes:
    """Part of a quantized matrix, [num_rows, num_columns]. Column k is in group `group_of[k]`, or in group
    k // `layout.group` if that is None. A weight is (value - zero) * scale + offset, with the zero, scale and
    offset of its row and group."""

    layout: CodeLayout
    values: Tensor  # [num_rows, num_columns]
    scales: Tensor  # float32 [num_rows, num_groups]
    zeros: Tensor | None = None  # float32 [num_rows, num_groups]
    group_of: Tensor | None = None  # int64 [num_columns]
    offsets: Tensor | None = None  # float32 [num_rows, num_groups]
    factors: Tensor | None = None
    """float32 [num_rows, num_factors, 1 or 2]: scales and offsets are integer multiples of these numbers. The
    factors of group g have index (g + `layout.first_group`) // `layout.groups_per_factor`."""

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
        """Apply an in-place operation to the weights [num_rows, num_columns] and their per-group numbers."""
        if self.group_of is not None:
            change(weights, per_group.index_select(1, self.group_of))
            return
        group = self.layout.group or max(1, weights.shape[1])
        num_whole = weights.shape[1] // group
        whole = weights[:, : num_whole * group]
        rest = weights[:, num_whole * group :]
        change(whole.view(len(whole), num_whole, group), per_group[:, :num_whole].unsqueeze(-1))
        change(rest, per_group[:, num_whole : num_whole + 1])


def join_rows(parts: Sequence[Codes]) -> Codes:
    """Concatenate parts that have the same layout and column order."""
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


def take_rows(codes: Codes, rows: slice) -> Codes:
    """Return some rows of a part."""
    values, *rest = (
        None if x is None else x[rows].contiguous()
        for x in (codes.values, codes.scales, codes.zeros, codes.offsets, codes.factors)
    )
    scales, zeros, offsets, factors = rest
    assert values is not None
    assert scales is not None
    return Codes(codes.layout, values, scales, zeros, codes.group_of, offsets, factors)


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
