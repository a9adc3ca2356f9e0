"""From which rows of a checkpoint's modules a matrix of ours is made.

A LoRA adapter names the checkpoint's modules, and a family's table of sources says how a matrix of ours is
packed, turned and regrouped from those. Rather than to say it a second time, the same sources are read from
a stand-in of the checkpoint, whose tensors hold numbers of rows in the place of weights; what arrives in our
matrix tells where each of its rows came from:

    q_proj [2, in]: rows 0, 1     k_proj [1, in]: row 0     ->  qkv: q_proj 0-1, k_proj 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import ALL

_ROW_BITS = 40  # of an element, for the number of its row; those above are its module's


@dataclass(frozen=True, slots=True)
class Rows:
    """Neighbouring rows of a module, whose name is as the family spells it. An expert of a tensor that holds
    all of them has its number at the end."""

    module: str
    first: int
    count: int


@dataclass(frozen=True)
class Numbered:
    """Stands for a tensor. An element is the number of its module, of its row and of its column, the last two
    added up: the first column of a matrix that is made of such is then the numbers of its rows, also where
    the checkpoint has it transposed, whose first row that is."""

    shape: tuple[int, ...]
    label: str
    modules: list[str]

    def entry(self, index: int) -> "Numbered":
        return Numbered(self.shape[1:], f"{self.label}.{index}", self.modules)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if self.label not in self.modules[-1:]:
            self.modules.append(self.label)
        base = (len(self.modules) - 1) << _ROW_BITS
        down, across = (
            torch.arange(*part.indices(size)) for part, size in zip((rows, columns), self.shape, strict=True)
        )
        return base + down[:, None] + across


class Numbers:
    """Stands for a checkpoint, and has a tensor of any name. Its shape is that of the checkpoint's where that
    has been read, since some sources cut by it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], prefix: str, shape: tuple[int, ...]):
        """`shapes` are of what has been read; all else has `shape`, that of our matrix: sources that join
        tensors name only such as were read."""
        self._shapes, self._prefix, self._shape = shapes, prefix, shape
        self.modules: list[str] = []

    def __contains__(self, name: str) -> bool:
        return True

    def fetch(self, name: str) -> Numbered:
        spellings = (name, name.removeprefix(self._prefix), self._prefix + name)
        shape = next((self._shapes[one] for one in spellings if one in self._shapes), self._shape)
        return Numbered(shape, name.rpartition(".")[0], self.modules)


def list_rows(column: Tensor, modules: Sequence[str]) -> tuple[Rows, ...]:
    """`column` is the first of a matrix that was read from `Numbers`, int64 [num_rows]; neighbours that count
    up are one run."""
    ends = [*(column.diff() != 1).nonzero().flatten().add(1).tolist(), len(column)]
    found, start = [], 0
    for end in ends:
        number = int(column[start])
        module = modules[number >> _ROW_BITS]
        found.append(Rows(module, number & ((1 << _ROW_BITS) - 1), end - start))
        start = end
    return tuple(found)
