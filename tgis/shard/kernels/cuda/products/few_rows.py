"""Products of few rows with the matrices of one size, which share the choice of their implementation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

Multiply = Callable[..., Tensor]
"""`multiply_few.launch`, or its twin."""


class MatrixSize(NamedTuple):
    out_features: int
    in_features: int
    dtype: torch.dtype
    is_wide: bool  # results are float32

    def __str__(self) -> str:
        return f"{self.out_features} x {self.in_features}"


@dataclass
class FewRows:
    """Products of few rows with the matrices of one size. `is_used` selects `multiply` for all of them."""

    multiply: Multiply
    is_used: bool
    _matrices: dict[int, ReferenceType[Tensor]] = field(default_factory=dict)  # by id

    def add(self, weight: Tensor) -> None:
        self._matrices[id(weight)] = ref(weight)

    def remove(self, weight: Tensor) -> None:
        """Leave a matrix out of `list_matrices`, because other kernels multiply it."""
        self._matrices.pop(id(weight), None)

    def list_matrices(self) -> list[Tensor]:
        """Return the matrices of this size that still exist."""
        return [weight for each in self._matrices.values() if (weight := each()) is not None]
