"""Weights as integers, whose columns share scales and zeros in groups: what GPTQ, AWQ, Marlin and
compressed-tensors have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import ALL, DTYPES, FileTensor, WeightsError

FLOATS = tuple(DTYPES.values())
INTEGERS = (torch.int32, torch.int64)
WORDS = (torch.int32,)


@dataclass(frozen=True)
class GroupedTensor(ABC):
    """Weight [out_features, in_features], or a stack of such matrices. Scales and zeros are read for ranges
    of groups; where the groups are not those of adjacent columns, `parts` has their indices, "g_idx"."""

    parts: Mapping[str, FileTensor]  # by the ends of their names; the first one has the weights
    shape: tuple[int, ...]
    bits: int
    group: int  # columns
    dtype: torch.dtype = torch.uint8  # of values
    has_zeros: bool = True

    @property
    def label(self) -> str:
        return next(iter(self.parts.values())).label

    def entry(self, index: int) -> Self:
        parts = {end: part.entry(index) for end, part in self.parts.items()}
        return replace(self, parts=parts, shape=self.shape[1:])

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        start, stop, _ = columns.indices(self.shape[1])
        step = self.layout().group or 1
        first, last = start // step * step, min(-(-stop // step) * step, self.shape[1])
        whole_groups = self.codes(rows, slice(first, last)).dequantize()
        return whole_groups[:, start - first : stop - first].contiguous()

    def layout(self, columns: slice = ALL) -> CodeLayout:
        is_reordered = self._group_of is not None
        group = None if is_reordered or self.group >= self.shape[-1] else self.group
        return CodeLayout(self.dtype, self.bits, group, self.has_zeros, is_reordered)

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        layout = self.layout()
        rows, columns = (
            slice(*part.indices(size)[:2]) for part, size in zip((rows, columns), self.shape, strict=True)
        )
        groups = slice(0, self.num_groups)
        if layout.group is not None:
            self._check_bounds(columns)
            groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        return Codes(
            layout,
            self._read_values(rows, columns).contiguous(),
            self._read_scales(rows, groups).float(),
            self._read_zeros(rows, groups).float() if self.has_zeros else None,
            None if self._group_of is None else self._group_of[columns],
        )

    @property
    def num_groups(self) -> int:
        return -(-self.shape[-1] // self.group)

    @abstractmethod
    def _read_values(self, rows: slice, columns: slice) -> Tensor:
        """Return integers of `dtype`, [num_rows, num_columns]."""

    @abstractmethod
    def _read_scales(self, rows: slice, groups: slice) -> Tensor:
        """Return floats, [num_rows, num_groups]."""

    @abstractmethod
    def _read_zeros(self, rows: slice, groups: slice) -> Tensor:
        """Return integers, [num_rows, num_groups]."""

    @cached_property
    def _group_of(self) -> Tensor | None:
        """Groups of columns, int64 [num_columns], unless all groups are those of adjacent columns."""
        if "g_idx" not in self.parts:
            return None
        stored = self.parts["g_idx"]
        group_of, adjacent = stored.read().long(), torch.arange(self.shape[1]) // self.group
        # Packers leave zeros, or minus ones, where columns keep their order.
        if torch.equal(group_of, adjacent) or not group_of.any() or (group_of == -1).all():
            return None
        least, most = (int(bound) for bound in group_of.aminmax())
        if least < 0 or most >= self.num_groups:
            found = least if least < 0 else most
            raise WeightsError(f"{stored.label} names group {found}, and there are {self.num_groups} groups")
        return group_of

    def _check_bounds(self, columns: slice) -> None:
        if columns.start % self.group or (columns.stop % self.group and columns.stop != self.shape[1]):
            text = f"columns {columns.start} to {columns.stop} cannot be cut out of groups of {self.group}"
            raise WeightsError(f"{self.label}: {text}")


@dataclass(frozen=True)
class ModuleParts:
    """Tensors of a quantized module. `first` is the end of the name of the one that has the weights."""

    tensors: Tensors
    module: str
    first: str

    def __bool__(self) -> bool:
        return f"{self.module}.{self.first}" in self.tensors

    def has(self, end: str) -> bool:
        return f"{self.module}.{end}" in self.tensors

    def fetch(self, end: str, dtypes: Sequence[torch.dtype], num_axes: int | None = None) -> FileTensor:
        """Return a tensor, which the module must have. Raises WeightsError."""
        name = f"{self.module}.{end}"
        if name not in self.tensors:
            label = self.tensors.fetch_any(f"{self.module}.{self.first}").label
            raise WeightsError(f"{label} is of no use without {name}, which is missing")
        found = self.tensors.fetch_any(name)
        if found.dtype not in dtypes:
            expected = " or ".join(map(_name_dtype, dtypes))
            raise WeightsError(f"{found.label} is stored as {_name_dtype(found.dtype)}, expected {expected}")
        if num_axes is not None and len(found.shape) != num_axes:
            raise WeightsError(f"{found.label} has shape {list(found.shape)}, expected {num_axes} axes")
        return found


def check_shape(part: FileTensor, expected: Sequence[int]) -> None:
    if part.shape != tuple(expected):
        raise WeightsError(f"{part.label} has shape {list(part.shape)}, expected {list(expected)}")


def find_group(
    scales: FileTensor, num_groups: int, num_columns: int, said: int | None, is_fixed: bool
) -> int:
    """Return the columns of a group: as many as the settings say, or, if they do not fit and are not fixed,
    as the number of groups implies. Raises WeightsError."""
    group = num_columns if said is not None and said <= 0 else said
    if group and -(-num_columns // group) == num_groups:
        return group
    if (group and is_fixed) or num_groups < 1 or num_columns % num_groups:
        size = f"groups of {group} by the checkpoint's settings" if group else "groups of one size"
        raise WeightsError(f"{scales.label} has {num_groups} groups, but {num_columns} columns are in {size}")
    return num_columns // num_groups


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
