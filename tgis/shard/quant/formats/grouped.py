"""Integer weights whose columns share scales and zeros in groups: common code of GPTQ, AWQ, Marlin and
compressed-tensors."""

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
    dtype: torch.dtype = torch.uint8  # type of the values
    has_zeros: bool = True
    offset: int = 0  # added to stored zeros


class GroupedMatrix(CodeMatrix):
    """Weight [out_features, in_features], or a stack of such matrices. `parts` are its tensors by the suffix
    of their names. The first holds the values; "g_idx" is present if groups may not be adjacent columns."""

    def __init__(self, parts: Mapping[str, FileTensor], shape: tuple[int, ...], grouping: Grouping):
        self.parts = parts
        self.grouping = grouping
        self.bits = grouping.bits
        self.num_groups = -(-shape[-1] // grouping.size)
        # The entries of a stack read their own order.
        has_order = "g_idx" in parts and len(parts["g_idx"].shape) == 1
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
        """Return the group of each column, int64 [num_columns], or None if groups are adjacent columns."""
        group_of = stored.read().long()
        adjacent = torch.arange(num_columns) // self.grouping.size
        # Some packers write zeros or minus ones if the columns are not reordered.
        if torch.equal(group_of, adjacent) or not group_of.any() or (group_of == -1).all():
            return None
        least, largest = (int(bound) for bound in group_of.aminmax())
        if least < 0 or largest >= self.num_groups:
            outside = least if least < 0 else largest
            raise WeightsError(f"{stored.label} refers to group {outside} of {self.num_groups}")
        return group_of


@dataclass(frozen=True)
class ModuleParts:
    """Tensors of a module. It is quantized if it has `first`, the tensor with the values."""

    tensors: Tensors
    module: str
    first: str

    def has(self, end: str) -> bool:
        return f"{self.module}.{end}" in self.tensors

    def fetch_values(self, *dtypes: torch.dtype) -> FileTensor:
        """Return the values: a matrix or a stack of matrices. Raises WeightsError."""
        values = self.tensors.fetch_any(f"{self.module}.{self.first}")
        values.check_type(*dtypes)
        if len(values.shape) < 2 or not all(values.shape):
            raise WeightsError(f"{values.label} has shape {list(values.shape)}, expected a matrix")
        return values

    def fetch(self, end: str, dtypes: tuple[torch.dtype, ...], num_axes: int | None = None) -> FileTensor:
        """Return a required tensor of a quantized module. Raises WeightsError."""
        name = f"{self.module}.{end}"
        if name not in self.tensors:
            label = self.tensors.fetch_any(f"{self.module}.{self.first}").label
            raise WeightsError(f"{label} needs {name}, which is missing")
        tensor = self.tensors.fetch_any(name)
        tensor.check_type(*dtypes)
        if num_axes is not None and len(tensor.shape) != num_axes:
            raise WeightsError(f"{tensor.label} has shape {list(tensor.shape)}, expected {num_axes} axes")
        return tensor


def find_group_size(
    scales: FileTensor, num_groups: int, num_columns: int, given: int | None, is_fixed: bool
) -> int:
    """Return the number of columns of a group: `given` by the settings or, if that does not fit and is not
    fixed, the one that the number of groups implies. Raises WeightsError."""
    size = num_columns if given is not None and given <= 0 else given
    if size and -(-num_columns // size) == num_groups:
        return size
    if (size and is_fixed) or num_groups < 1 or num_columns < 1 or num_columns % num_groups:
        kind = f"groups of {size} by the checkpoint's settings" if size else "groups of equal size"
        raise WeightsError(f"{scales.label} has {num_groups} groups, but {num_columns} columns are in {kind}")
    return num_columns // num_groups
