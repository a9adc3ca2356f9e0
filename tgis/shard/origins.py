"""From which rows of a checkpoint's modules a matrix of ours is made, found by reading numbers in the place
of weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.stored import ALL

_ROW_BITS = 40  # of the number of a row; those above are the module's


@dataclass(frozen=True, slots=True)
class Rows:
    """Neighbouring rows of a module, whose name is as the family spells it. An expert of a tensor that holds
    all of them has its number at the end."""

    module: str
    first: int
    count: int


@dataclass(frozen=True)
class Numbered:
    """Stands for a tensor; an element is the sum of its row and its column, so that the first column of a
    matrix is the numbers of its rows, however it is turned."""

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
    """Has a tensor of any name; of those that the checkpoint had, with its shape there."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], prefix: str, shape: tuple[int, ...]):
        """`shape` is of those that it did not have."""
        self._shapes, self._prefix, self._shape = shapes, prefix, shape
        self.modules: list[str] = []

    def __contains__(self, name: str) -> bool:
        return True

    def fetch(self, name: str) -> Numbered:
        spellings = (name, name.removeprefix(self._prefix), self._prefix + name)
        shape = next((self._shapes[one] for one in spellings if one in self._shapes), self._shape)
        return Numbered(shape, name.rpartition(".")[0], self.modules)


def list_rows(column: Tensor, modules: Sequence[str]) -> tuple[Rows, ...]:
    """`column` is what `Numbered` has in its first, int64 [num_rows]."""
    ends = [*(column.diff() != 1).nonzero().flatten().add(1).tolist(), len(column)]
    found, start = [], 0
    for end in ends:
        number = int(column[start])
        module = modules[number >> _ROW_BITS]
        found.append(Rows(module, number & ((1 << _ROW_BITS) - 1), end - start))
        start = end
    return tuple(found)
