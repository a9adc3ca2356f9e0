"""Checks and choices that all products make before they run their kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import Kernel


def check_rows(x: Tensor, in_features: int) -> None:
    """Check that x is what kernels of products read, float32 [num_rows, in_features] without gaps."""
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    assert x.shape[1] == in_features


def choose_run(kernel: Kernel, num_multiplications: int, min_parallel: int) -> Callable[..., None]:
    """Return what runs the kernel: on all threads, or, with fewer multiplications than `min_parallel`, on
    this one, because waking a second one does not pay then."""
    return kernel if num_multiplications < min_parallel else kernel.parallel
