"""Times products of few rows by `multiply_few` and by cuBLAS."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from tgis.errors import first_line
from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS
from tgis.shard.kernels.cuda.products.few_rows import FewRows, MatrixSize, Multiply
from tgis.shard.kernels.cuda.products.wide import multiply_floats

NUM_ROWS = 1, MAX_ROWS  # that are timed
MAX_MATRICES = 64  # of a size that are timed, more than any cache holds
MAX_SHARE = 0.98  # of cuBLAS's time that `multiply_few` may take to be used
ALIGNMENT = 16  # of columns, for loads of 16 bytes
MAX_SECONDS = 10.0  # after which no further size is timed

Timer = Callable[[Callable[[], None]], float]
"""Function that returns the seconds in which the device computes some work."""


class Timing(NamedTuple):
    """Times of the products with the matrices of one size."""

    is_faster: bool  # `multiply_few`
    figures: str  # or why there are none


class SizeTimer:
    """Times sizes until the time is over."""

    def __init__(self, timer: Timer, clock: Callable[[], float] = time.monotonic):
        self._timer = timer
        self._clock = clock
        self._began = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @torch.inference_mode()
    def time_all(self, sizes: Mapping[MatrixSize, FewRows]) -> dict[MatrixSize, Timing]:
        """Time both ways at each size, first at those of whose matrices a step reads most."""
        order = sorted(sizes, key=lambda size: _count_elements(size, sizes[size]), reverse=True)
        return {size: self._time(size, sizes[size]) for size in order}

    def _time(self, size: MatrixSize, few: FewRows) -> Timing:
        weights = few.list_matrices()[:MAX_MATRICES]
        if size.dtype.itemsize != 2 or size.in_features % ALIGNMENT or not weights:
            return Timing(False, "of this type or size, not timed")
        if self.seconds > MAX_SECONDS:
            return Timing(False, f"not timed: {MAX_SECONDS:g} s are over")
        try:
            times = [self._time_both(size, few.multiply, weights, num_rows) for num_rows in NUM_ROWS]
        except (RuntimeError, TritonError) as error:  # not captured, not compiled, or there is no memory
            return Timing(False, f"not timed: {first_line(error)}")
        own, other = (sum(each) for each in zip(*times, strict=True))
        figures = ", ".join(f"{own * 1e6:.1f} and {other * 1e6:.1f}" for own, other in times)
        return Timing(own <= MAX_SHARE * other, figures)

    def _time_both(
        self, size: MatrixSize, multiply: Multiply, weights: Sequence[Tensor], num_rows: int
    ) -> tuple[float, float]:
        """Return the seconds of a product by `multiply_few` and by cuBLAS, over all matrices in turn, so that
        no cache holds them."""
        x = torch.randn(num_rows, size.in_features, device=weights[0].device).to(size.dtype)
        dtype = torch.float32 if size.is_wide else size.dtype

        def multiply_few() -> None:
            for weight in weights:
                multiply(x, weight, None, dtype)

        def use_library() -> None:
            for weight in weights:
                multiply_floats(x, weight, size.is_wide)

        return self._timer(multiply_few) / len(weights), self._timer(use_library) / len(weights)


def _count_elements(size: MatrixSize, few: FewRows) -> int:
    return size.out_features * size.in_features * len(few.list_matrices())
