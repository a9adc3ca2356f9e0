"""Choice between cuBLAS and `multiply_few` for products of few rows, by size of matrix. On a GPU, it is
measured when the model is loaded."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from triton.errors import TritonError

from tgis.errors import first_line
from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS
from tgis.shard.kernels.cuda.products.wide import multiply_floats

logger = logging.getLogger(__name__)

NUM_ROWS = 1, MAX_ROWS  # that are timed
MAX_MATRICES = 64  # of a size that are timed, more than any cache holds
MAX_SHARE = 0.98  # of cuBLAS's time that `multiply_few` may take to be used
ALIGNMENT = 16  # of columns, for loads of 16 bytes

Multiply = Callable[..., Tensor]
"""`multiply_few.launch`, or its twin."""
Timer = Callable[[Callable[[], None]], float]
"""Function that returns the seconds in which the device computes some work."""


@dataclass
class FewRows:
    """Products of few rows with the matrices of one size. `is_used` selects `multiply` for all of them."""

    multiply: Multiply
    is_used: bool
    matrices: list[ReferenceType[Tensor]] = field(default_factory=list)  # those that may be timed


class MatrixSize(NamedTuple):
    out_features: int
    in_features: int
    dtype: torch.dtype
    is_wide: bool  # results are float32


class ProductChoices:
    """Choices for all matrices of a shard. `is_used` is the choice before a measurement."""

    def __init__(self, multiply: Multiply, is_used: bool = False):
        self._multiply = multiply
        self._is_used = is_used
        self._sizes: dict[MatrixSize, FewRows] = {}

    def add(self, weight: Tensor, is_wide: bool) -> FewRows | None:
        """Return the choice for a weight [out_features, in_features], or None if there is none."""
        if not weight.is_contiguous():
            return None
        out_features, in_features = weight.shape
        size = MatrixSize(out_features, in_features, weight.dtype, is_wide)
        few = self._sizes.setdefault(size, FewRows(self._multiply, self._is_used))
        few.matrices = [each for each in few.matrices if each() is not None]
        if len(few.matrices) < MAX_MATRICES:
            few.matrices.append(ref(weight))
        return few

    @torch.inference_mode()
    def measure(self, time: Timer, agree: Callable[[int], int]) -> None:
        """Time the products of each size, and use the faster ones. All ranks must choose alike, because some
        matrices are whole on every rank: `agree` returns the smallest of the ranks' values. All must call
        this, also one that can time nothing: its `time` raises RuntimeError."""
        lines = []
        has_all = agree(len(self._sizes)) == -agree(-len(self._sizes))
        for size, few in self._sizes.items():
            is_faster, figures = _compare(size, few, time)
            few.is_used = has_all and bool(agree(is_faster))
            name = "multiply_few" if few.is_used else "cuBLAS"
            lines.append(f"{size.out_features} x {size.in_features}: {name} ({figures})")
        if lines:
            logger.info(
                "products of up to %d rows, microseconds of multiply_few and cuBLAS at %d and %d rows: %s",
                MAX_ROWS,
                *NUM_ROWS,
                "; ".join(lines),
            )


def _compare(size: MatrixSize, few: FewRows, time: Timer) -> tuple[bool, str]:
    """Return whether `multiply_few` is faster at a size, and the figures or why there are none."""
    weights = [weight for each in few.matrices if (weight := each()) is not None]
    if size.dtype.itemsize != 2 or size.in_features % ALIGNMENT or not weights:
        return False, "of this type or size, not timed"
    try:
        times = [_time_both(size, few.multiply, weights, num_rows, time) for num_rows in NUM_ROWS]
    except (RuntimeError, TritonError) as error:  # not captured, not compiled, or there is no memory
        return False, f"not timed: {first_line(error)}"
    own, other = (sum(each) for each in zip(*times, strict=True))
    figures = ", ".join(f"{own * 1e6:.1f} and {other * 1e6:.1f}" for own, other in times)
    return own <= MAX_SHARE * other, figures


def _time_both(
    size: MatrixSize, multiply: Multiply, weights: Sequence[Tensor], num_rows: int, time: Timer
) -> tuple[float, float]:
    """Return the seconds of a product by `multiply_few` and by cuBLAS, over all matrices in turn, so that no
    cache holds them."""
    x = torch.randn(num_rows, size.in_features, device=weights[0].device).to(size.dtype)
    dtype = torch.float32 if size.is_wide else size.dtype

    def multiply_few() -> None:
        for weight in weights:
            multiply(x, weight, None, dtype)

    def use_library() -> None:
        for weight in weights:
            multiply_floats(x, weight, size.is_wide)

    return time(multiply_few) / len(weights), time(use_library) / len(weights)
