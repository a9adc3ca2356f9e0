"""The canonical form of quantized weights. Every format of checkpoints is read into it, every scheme that
rounds weights when they are read gives it, and a platform packs it into products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a value and its part of a float32 scale, as products hold them, for wide matrices. They
        hold fewer bits than 4 as 4, and a scale for each 128 columns of a larger group."""
        return max(self.bits, 4) / 8 + 4 / min(self.group or 128, 128)


@dataclass(frozen=True, eq=False)
class Codes:
    """Part of a quantized matrix, [num_rows, num_columns]. Column k is in group `group_of[k]`, or else in
    group k // `layout.group`, and a weight is (value - zero) * scale with its row's and group's numbers."""

    layout: CodeLayout
    values: Tensor  # [num_rows, num_columns]
    scales: Tensor  # float32 [num_rows, num_groups]
    zeros: Tensor | None = None  # float32 [num_rows, num_groups]
    group_of: Tensor | None = None  # int64 [num_columns]

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
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Codes(
        first.layout,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
        first.group_of,
    )
