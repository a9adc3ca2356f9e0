"""Weights as integers, whose columns share scales and zeros in groups: what GPTQ, AWQ, Marlin and
compressed-tensors have in common."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import DTYPES, FileTensor, WeightsError

FLOATS = tuple(DTYPES.values())
INTEGERS = (torch.int32, torch.int64)
WORDS = (torch.int32,)


@dataclass(frozen=True)
class Grouping:
    bits: int
    size: int  # columns of a group
    dtype: torch.dtype = torch.uint8  # of values
    has_zeros: bool = True
    offset: int = 0  # that is added to stored zeros


class GroupedMatrix(CodeMatrix):
    """Weight [out_features, in_features], or a stack of such matrices. `parts` are its tensors by the ends of
    their names: first the values, and "g_idx" if the groups may not be those of adjacent columns."""

    def __init__(self, parts: Mapping[str, FileTensor], shape: tuple[int, ...], grouping: Grouping):
        self.parts = parts
        self.grouping = grouping
        self.bits = grouping.bits
        self.num_groups = -(-shape[-1] // grouping.size)
        has_order = "g_idx" in parts and len(parts["g_idx"].shape) == 1  # else it is a stack's
        self._group_of = self._read_order(parts["g_idx"], shape[-1]) if has_order else None
        is_reordered = self._group_of is not None
        size = None if is_reordered or self.num_groups == 1 else grouping.size
        layout = CodeLayout(grouping.dtype, grouping.bits, size, grouping.has_zeros, is_reordered)
        super().__init__(shape, next(iter(parts.values())).label, layout)

    def entry(self, index: int) -> Self:
        parts = {end: part.entry(index) for end, part in self.parts.items()}
        return type(self)(parts, self.shape[1:], self.grouping)

    def take(self, rows: range, columns: range) -> Codes:
        size = self._layout.group
        groups = range(columns.start // size, -(-columns.stop // size)) if size else range(self.num_groups)
        return Codes(
            self._layout,
            self._read_values(rows, columns).contiguous(),
            self._read_scales(rows, groups).float(),
            self._read_zeros(rows, groups).float() if self.grouping.has_zeros else None,
            None if self._group_of is None else self._group_of[columns.start : columns.stop],
        )

    def read_part(self, end: str, rows: range, columns: range) -> Tensor:
        return self.parts[end].read(as_slice(rows), as_slice(columns))

    @abstractmethod
    def _read_values(self, rows: range, columns: range) -> Tensor:
        """Return integers, [num_rows, num_columns]."""

    @abstractmethod
    def _read_scales(self, rows: range, groups: range) -> Tensor:
        """Return floats, [num_rows, num_groups]."""

    @abstractmethod
    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        """Return integers, [num_rows, num_groups]."""

    def _read_order(self, stored: FileTensor, num_columns: int) -> Tensor | None:
        """Return the groups of columns, int64 [num_columns], unless they are those of adjacent columns."""
        group_of = stored.read().long()
        adjacent = torch.arange(num_columns) // self.grouping.size
        # Packers leave zeros, or minus ones, where columns keep their order.
        if torch.equal(group_of, adjacent) or not group_of.any() or (group_of == -1).all():
            return None
        least, most = (int(bound) for bound in group_of.aminmax())
        if least < 0 or most >= self.num_groups:
            found = least if least < 0 else most
            raise WeightsError(f"{stored.label} names group {found}, and there are {self.num_groups} groups")
        return group_of


@dataclass(frozen=True)
class ModuleParts:
    """Tensors of a module, which is quantized if it has `first`, the one with the values."""

    tensors: Tensors
    module: str
    first: str

    def has(self, end: str) -> bool:
        return f"{self.module}.{end}" in self.tensors

    def fetch_values(self, *dtypes: torch.dtype) -> FileTensor:
        """Return the tensor with the values: a matrix or a stack of matrices. Raises WeightsError."""
        found = self.tensors.fetch_any(f"{self.module}.{self.first}")
        found.check_type(*dtypes)
        if len(found.shape) < 2 or not all(found.shape):
            raise WeightsError(f"{found.label} has shape {list(found.shape)}, expected a matrix")
        return found

    def fetch(self, end: str, dtypes: tuple[torch.dtype, ...], num_axes: int | None = None) -> FileTensor:
        """Return a tensor that a quantized module must have. Raises WeightsError."""
        name = f"{self.module}.{end}"
        if name not in self.tensors:
            label = self.tensors.fetch_any(f"{self.module}.{self.first}").label
            raise WeightsError(f"{label} is of no use without {name}, which is missing")
        found = self.tensors.fetch_any(name)
        found.check_type(*dtypes)
        if num_axes is not None and len(found.shape) != num_axes:
            raise WeightsError(f"{found.label} has shape {list(found.shape)}, expected {num_axes} axes")
        return found


def find_group_size(
    scales: FileTensor, num_groups: int, num_columns: int, said: int | None, is_fixed: bool
) -> int:
    """Return the columns of a group: as many as the settings say, or, if they do not fit and are not fixed,
    as the number of groups implies. Raises WeightsError."""
    size = num_columns if said is not None and said <= 0 else said
    if size and -(-num_columns // size) == num_groups:
        return size
    if (size and is_fixed) or num_groups < 1 or num_columns < 1 or num_columns % num_groups:
        kind = f"groups of {size} by the checkpoint's settings" if size else "groups of one size"
        raise WeightsError(f"{scales.label} has {num_groups} groups, but {num_columns} columns are in {kind}")
    return num_columns // num_groups
