"""The scheme that rounds linear layers and the head to 8 bits when they are read. GROUP adjacent values of a
row share a scale: the group's largest magnitude over 127. Values divided by the scale are rounded half to
even."""

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL, Stored
from tgis.shard.quant.interface import MatrixRole

GROUP = 128
LAYOUT = CodeLayout(torch.int8, 8, GROUP)
_LARGEST = torch.tensor(127.0)
_TINY = 1e-30  # groups whose largest magnitude is smaller become zeros
_ZERO, _NAN = torch.tensor(0.0), torch.tensor(float("nan"))


class Int8:
    layout = LAYOUT

    def encode(self, role: MatrixRole, stored: Stored) -> Stored:
        return Rounded(stored) if role in ("linear", "head") else stored


class Rounded:
    """View of a matrix whose weights are rounded. The groups of a part begin at its first column, so that a
    rank's part is rounded by itself."""

    def __init__(self, stored: Stored):
        self._stored, self.shape, self.label = stored, stored.shape, stored.label

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self.codes(rows, columns).dequantize()

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return LAYOUT

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        return round_weights(self._stored.read(rows, columns))


def round_weights(weights: Tensor) -> Codes:
    """Round float weights [num_rows, num_columns]. A group with a number that is not finite has the scale
    NaN."""
    num_rows, num_columns = weights.shape
    if num_columns % GROUP:
        padded = torch.zeros(num_rows, -(-num_columns // GROUP) * GROUP)
        padded[:, :num_columns] = weights
    else:
        padded = weights.float()
    groups = padded.view(num_rows, -1, GROUP)
    magnitudes = groups.abs()
    largest = magnitudes.amax(-1)  # [num_rows, num_groups]
    largest = torch.where(largest.isfinite(), largest, _NAN)
    largest = torch.where(largest < _TINY, _ZERO, largest)
    factors = torch.where(largest > 0, _LARGEST / largest, _ZERO).unsqueeze(-1)
    values = torch.mul(groups, factors, out=magnitudes).round_().to(torch.int8).view(num_rows, -1)
    return Codes(LAYOUT, values[:, :num_columns].contiguous(), largest / _LARGEST)
