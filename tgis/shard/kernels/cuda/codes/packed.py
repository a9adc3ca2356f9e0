"""Memory layout of codes on GPUs. A matrix is split into panels of OUTPUTS rows, and a panel into tiles of
two halves of `piece` columns each. A half lies in one group. With 4 bits, the lower 4 bits of a tile's bytes
are the codes of its first half, and the upper 4 bits those of its second; with 8 bits, the second half is
after the first. All tiles of a panel are adjacent, so that a program reads consecutive memory."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

OUTPUTS = 64  # rows of a panel
MAX_PIECE, MIN_PIECE = 64, 16

Numbers = Literal["integers", "table", "float8"]
"""What codes are: integers minus `PackedCodes.centre` or a zero, indices of a table, or e4m3 floats."""


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """Matrix [out_features, in_features]. A weight is (number - zero) * scale + offset."""

    out_features: int
    in_features: int
    bits: int  # 4 or 8
    numbers: Numbers
    piece: int
    pieces_per_group: int
    centre: int  # subtracted from integers without zeros
    codes: Tensor
    """uint8 [num_panels, num_tiles, OUTPUTS, piece], with 8 bits [..., 2, OUTPUTS, piece]"""
    scales: Tensor  # any float type [num_panels, num_groups, OUTPUTS]
    zeros: Tensor | None = None  # int16, as `scales`
    offsets: Tensor | None = None  # type and shape of `scales`
    table: Tensor | None = None  # float32 [16]
    order: Tensor | None = (
        None  # int32 [num_tiles * 2 * piece]: columns of x in the order of codes; -1: padding
    )

    @property
    def num_tiles(self) -> int:
        return self.codes.shape[1]

    @property
    def num_panels(self) -> int:
        return self.codes.shape[0]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def shares_scales(self) -> bool:
        """True if both halves of every tile are in the same group."""
        return self.pieces_per_group % 2 == 0

    def to(self, device: torch.device) -> Self:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def list_halves(self) -> Tensor:
        """Return the codes in the order of tiles, uint8 [num_panels * OUTPUTS, num_tiles * 2 * piece]."""
        halves = self.codes
        if self.bits == 4:
            halves = torch.stack((halves & 15, halves >> 4), 2)
        return halves.permute(0, 3, 1, 2, 4).reshape(self.num_panels * OUTPUTS, -1)
