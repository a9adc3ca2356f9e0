"""Traces the rows of a model's matrix back to the rows of the checkpoint's modules.

A LoRA adapter names the checkpoint's modules. A family's table of sources defines how a matrix of the model
is packed and regrouped from them. To avoid a second definition, the same sources are read from placeholder
modules whose weights hold row numbers. The numbers in the resulting matrix give the origin of each row:

    q_proj [2, in]: rows 0, 1     k_proj [1, in]: row 0     ->  qkv: q_proj 0-1, k_proj 0
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import ALL, FloatsOnly

_ROW_BITS = 40  # the low bits of an element are its row number; the high bits are its module's number


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """Rows of a module: `count` rows from `first` on, every `step`-th one. `module` is the family's name for
    it, followed by the expert's number if one tensor holds all experts."""

    module: str
    first: int
    count: int
    step: int = 1

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + (self.count - 1) * self.step + 1, self.step)

    def take(self, start: int, count: int) -> "ModuleRows":
        """Return `count` of these rows, from number `start` on."""
        return ModuleRows(self.module, self.first + start * self.step, count, self.step)


@dataclass(frozen=True)
class NumberedTensor(FloatsOnly):
    """Placeholder for a module's weight [out_features, in_features]. Each element encodes its module's number
    and its row number."""

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
    """Placeholder for a checkpoint that has a module of every name. Each weight has the shape of the real
    one, because some sources split by it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]):
        """Use the known `shapes` of weights, and for other weights `shape`, the shape of the model's matrix.
        That suffices, because sources that join several weights name only weights with known shapes."""
        self._shapes = shapes
        self._shape = shape
        self.modules: list[str] = []

    def find(self, module: str, end: str, entry: int | None, is_transposed: bool) -> NumberedTensor:
        name = name_entry(module, entry)
        return NumberedTensor(self._shapes.get(name, self._shape), name, self.modules)


def name_entry(module: str, entry: int | None) -> str:
    """Return the name of a module, or of its entry if its tensor holds all experts."""
    return module if entry is None else f"{module}.{entry}"


def list_rows(column: Tensor, modules: Sequence[str]) -> tuple[ModuleRows, ...]:
    """Return the runs of rows of one module with equal steps in `column`, int64 [num_rows]: the first column
    of a matrix that was read from `NumberedModules`."""
    steps = column.diff()
    last = len(column) - 1
    changes = [*(steps.diff() != 0).nonzero().flatten().add(1).tolist(), last]  # ends of runs of equal steps
    runs = []
    start = 0
    while start <= last:
        number = int(column[start])
        end = changes[bisect_right(changes, start)] if start < last else start
        step = int(steps[start]) if start < last else 1
        if step != 1 and (end - start < 2 or not 0 < step < 1 << (_ROW_BITS - 1)):
            # Two rows are no run unless they are adjacent: the second one may begin another run.
            end = start
            step = 1
        row = number & ((1 << _ROW_BITS) - 1)
        runs.append(ModuleRows(modules[number >> _ROW_BITS], row, end - start + 1, step))
        start = end + 1
    return tuple(runs)
