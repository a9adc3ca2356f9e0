"""Traces the rows of a model's matrix back to the rows of the checkpoint's modules.

A LoRA adapter names the checkpoint's modules. A family's table of sources says how a matrix of the model is
packed, transposed and regrouped from them. To avoid a second description, the same sources are read from a
placeholder checkpoint, whose tensors hold row numbers instead of weights. The numbers in the resulting matrix
show where each of its rows came from:

    q_proj [2, in]: rows 0, 1     k_proj [1, in]: row 0     ->  qkv: q_proj 0-1, k_proj 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import ALL

_ROW_BITS = 40  # low bits of an element, which hold its row number; the bits above hold its module's number


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """Consecutive rows of a module. `module` is the name that the family uses. If a tensor holds all experts,
    the expert's number is appended to it."""

    module: str
    first: int
    count: int


@dataclass(frozen=True)
class NumberedTensor:
    """Placeholder for a tensor. Each element encodes the number of its module and the sum of its row and
    column numbers. So the first column of a matrix made of such tensors holds its row numbers, even if the
    checkpoint stores the matrix transposed."""

    shape: tuple[int, ...]
    label: str
    modules: list[str]

    def entry(self, index: int) -> "NumberedTensor":
        return NumberedTensor(self.shape[1:], f"{self.label}.{index}", self.modules)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if self.label not in self.modules[-1:]:
            self.modules.append(self.label)
        base = (len(self.modules) - 1) << _ROW_BITS
        down, across = (
            torch.arange(*part.indices(size)) for part, size in zip((rows, columns), self.shape, strict=True)
        )
        return base + down[:, None] + across


class NumberedCheckpoint:
    """Placeholder for a checkpoint, with a tensor of any name. The tensor has the shape of the checkpoint's
    tensor if that was read before, because some sources split by it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], prefix: str, shape: tuple[int, ...]):
        """Take the `shapes` of the tensors that were read. All other tensors get `shape`, that of the
        model's matrix; this suffices, because sources that join tensors name only tensors that were read."""
        self._shapes, self._prefix, self._shape = shapes, prefix, shape
        self.modules: list[str] = []

    def __contains__(self, name: str) -> bool:
        return True

    def fetch(self, name: str) -> NumberedTensor:
        spellings = (name, name.removeprefix(self._prefix), self._prefix + name)
        shape = next((self._shapes[one] for one in spellings if one in self._shapes), self._shape)
        return NumberedTensor(shape, name.rpartition(".")[0], self.modules)


def list_rows(column: Tensor, modules: Sequence[str]) -> tuple[ModuleRows, ...]:
    """Return the runs of consecutive rows in `column`, the first column of a matrix that was read from
    `NumberedCheckpoint`, int64 [num_rows]."""
    ends = [*(column.diff() != 1).nonzero().flatten().add(1).tolist(), len(column)]
    found, start = [], 0
    for end in ends:
        number = int(column[start])
        module = modules[number >> _ROW_BITS]
        found.append(ModuleRows(module, number & ((1 << _ROW_BITS) - 1), end - start))
        start = end
    return tuple(found)
