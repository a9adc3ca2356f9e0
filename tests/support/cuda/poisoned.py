"""Memory that shows reads of unwritten values."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GUARD = 3  # rows before and after the data


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(5).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def guard(x: Tensor) -> Tensor:
    """Return a copy of x, [n, any], with rows of NaN around it."""
    around = x.new_full((len(x) + 2 * GUARD, *x.shape[1:]), float("nan"))
    around[GUARD : GUARD + len(x)] = x
    return around[GUARD : GUARD + len(x)]


def is_guarded(x: Tensor) -> bool:
    """Return whether the rows that `guard` added around x are still NaN."""
    around = x._base
    assert around is not None
    return bool(around[:GUARD].isnan().all() and around[-GUARD:].isnan().all())
