"""Importance of the columns of a matrix: the mean squares of the inputs that multiply them. A search for the
scales of rounded weights counts the error of a column by its importance, because the error of a product grows
with the inputs."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

Importance = Mapping[str, Tensor]
"""Importance, float32 [num_columns], by path of the matrix."""
NO_IMPORTANCE: Importance = MappingProxyType({})

_MAX_EXPONENT = 10  # keeps the sums of all columns precise


def choose_importance(mean_squares: Tensor) -> Tensor | None:
    """Return the importance of columns whose inputs have these mean squares, or None if all are 0. They are
    powers of two, so that inputs that differ in their last bits have the same importance."""
    mean = mean_squares.mean()
    if not (mean > 0 and mean.isfinite()):
        return None
    return (mean_squares / mean).log2().round().clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp2()
