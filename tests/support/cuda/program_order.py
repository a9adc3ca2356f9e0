"""Order of a kernel's programs in Triton's interpreter, which is undefined on a GPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import triton.runtime.interpreter as interpreter


@contextmanager
def reversed_programs() -> Iterator[None]:
    """Run the last program of a launch first, to detect programs that overwrite each other's results."""
    builder = interpreter.interpreter_builder
    set_size, set_place = builder.set_grid_dim, builder.set_grid_idx
    size = 1, 1, 1

    def keep_size(*new: int) -> None:
        nonlocal size
        size = new
        set_size(*new)

    def set_mirrored(*place: int) -> None:
        last = math.prod(size) - 1
        set_place(*np.unravel_index(last - np.ravel_multi_index(place, size), size))

    builder.set_grid_dim, builder.set_grid_idx = keep_size, set_mirrored
    try:
        yield
    finally:
        builder.set_grid_dim, builder.set_grid_idx = set_size, set_place
