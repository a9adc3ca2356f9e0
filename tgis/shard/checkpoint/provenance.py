"""Traces the rows of a model's matrix back to the rows of the checkpoint's modules.

A LoRA adapter names the checkpoint's modules. A family's table of sources says how a matrix of the model is
packed and regrouped from them. To avoid a second description, the same sources are read from placeholder
modules, whose weights hold row numbers. The numbers in the resulting matrix show where each of its rows came
from:

    q_proj [2, in]: rows 0, 1     k_proj [1, in]: row 0     ->  qkv: q_proj 0-1, k_proj 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import ALL, FloatsOnly

_ROW_BITS = 40  # low bits of an element, which hold its row number; the bits above hold its module's number


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """Consecutive rows of a module. `module` is the name that the family uses. If a tensor holds all experts,
    the expert's number is appended to it."""

    module: str
    first: int
    count: int


@dataclass(frozen=True)
class NumberedTensor(FloatsOnly):
    """Placeholder for a module's weight [out_features, in_features]. Each element encodes the numbers of its
    module and its row."""

    shape: tuple[int, ...]
    label: str
    modules: list[str]

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if self.label not in self.modules[-1:]:
            self.modules.append(self.label)
        base = (len(self.modules) - 1) << _ROW_BITS
        height, width = self.shape
        numbers = torch.arange(*rows.indices(height)) + base
        return numbers.unsqueeze(1).expand(-1, len(range(width)[columns]))


class NumberedModules:
    """Placeholder for a checkpoint's modules, with a module of any name. Its weight has the shape that was
    found before, because some sources split by it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]):
        """Take the `shapes` of the weights that were found. All others get `shape`, that of the model's
        matrix; this suffices, because sources that join weights name only some that were found."""
        self._shapes, self._shape = shapes, shape
        self.modules: list[str] = []

    def find(self, module: str, end: str, entry: int | None, is_transposed: bool) -> NumberedTensor:
        name = name_entry(module, entry)
        return NumberedTensor(self._shapes.get(name, self._shape), name, self.modules)


def name_entry(module: str, entry: int | None) -> str:
    """Return the name of an entry of a module whose tensor holds all experts, or of the module itself."""
    return module if entry is None else f"{module}.{entry}"


def list_rows(column: Tensor, modules: Sequence[str]) -> tuple[ModuleRows, ...]:
    """Return the runs of consecutive rows in `column`, the first column of a matrix that was read from
    `NumberedModules`, int64 [num_rows]."""
    ends = [*(column.diff() != 1).nonzero().flatten().add(1).tolist(), len(column)]
    found, start = [], 0
    for end in ends:
        number = int(column[start])
        module = modules[number >> _ROW_BITS]
        found.append(ModuleRows(module, number & ((1 << _ROW_BITS) - 1), end - start))
        start = end
    return tuple(found)
