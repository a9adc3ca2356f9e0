"""Choice between cuBLAS and `multiply_few` for products of few rows, by size of matrix. On a GPU, it is
measured when the model is loaded."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS
from tgis.shard.kernels.cuda.products.few_rows import FewRows, MatrixSize, Multiply
from tgis.shard.kernels.cuda.products.stored_choices import NOT_STORED, StoredChoices
from tgis.shard.kernels.cuda.products.timing import NUM_ROWS, SizeTimer, Timer, Timing

logger = logging.getLogger(__name__)

Agree = Callable[[int], int]
"""Function that returns the smallest of the ranks' values."""


class ProductChoices:
    """Choices for all matrices of a shard. `is_used` is the choice before a measurement."""

    def __init__(self, multiply: Multiply, is_used: bool = False):
        self._multiply = multiply
        self._is_used = is_used
        self._all: dict[MatrixSize, FewRows] = {}

    def add(self, weight: Tensor, is_wide: bool) -> FewRows | None:
        """Return the choice for a weight [out_features, in_features], or None if there is none."""
        if not weight.is_contiguous():
            return None
        out_features, in_features = weight.shape
        size = MatrixSize(out_features, in_features, weight.dtype, is_wide)
        few = self._all.setdefault(size, FewRows(self._multiply, self._is_used))
        few.add(weight)
        return few

    def measure(self, timer: Timer, agree: Agree, stored: StoredChoices = NOT_STORED) -> None:
        """Time the products of each size and use the faster ones, or use the stored choices if all ranks have
        them. All ranks must choose alike, because some matrices are whole on every rank. So all must call
        this, also one that can time nothing: its `timer` raises RuntimeError."""
        sizes = {size: few for size, few in self._all.items() if few.list_matrices()}
        if agree(len(sizes)) != -agree(-len(sizes)):
            logger.warning("cuBLAS computes products of few rows, because the ranks' matrices differ")
            _choose(sizes, dict.fromkeys(sizes, False), agree=lambda value: value)
            return
        known = stored.read(sizes)
        if agree(known is not None) and known is not None:
            _choose(sizes, known, agree)
            _log_known(sizes)
        else:
            size_timer = SizeTimer(timer)
            timings = size_timer.time_all(sizes)
            _choose(sizes, {size: timing.is_faster for size, timing in timings.items()}, agree)
            _log_times(sizes, timings, size_timer.seconds)
        stored.write({size: few.is_used for size, few in sizes.items()})


def _choose(sizes: Mapping[MatrixSize, FewRows], own: Mapping[MatrixSize, bool], agree: Agree) -> None:
    """Use `multiply_few` for the sizes for which all ranks do. They have their sizes in the same order."""
    for size, few in sizes.items():
        few.is_used = bool(agree(own[size]))


def _log_known(sizes: Mapping[MatrixSize, FewRows]) -> None:
    if sizes:
        lines = (f"{size}: {_name(few)}" for size, few in sizes.items())
        logger.info("products of up to %d rows as before the restart: %s", MAX_ROWS, "; ".join(lines))


def _log_times(
    sizes: Mapping[MatrixSize, FewRows], timings: Mapping[MatrixSize, Timing], seconds: float
) -> None:
    if sizes:
        lines = (f"{size}: {_name(sizes[size])} ({timing.figures})" for size, timing in timings.items())
        logger.info(
            "products of up to %d rows, timed in %.1f s, microseconds of multiply_few and cuBLAS at %d and "
            "%d rows: %s",
            MAX_ROWS,
            seconds,
            *NUM_ROWS,
            "; ".join(lines),
        )


def _name(few: FewRows) -> str:
    return "multiply_few" if few.is_used else "cuBLAS"
