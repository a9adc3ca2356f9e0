"""Checks and choices of all products before a kernel is launched."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import Kernel


def check_rows(x: Tensor, in_features: int, types: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Check that x is contiguous [num_rows, in_features] and of one of these types."""
    assert x.is_contiguous()
    assert x.dtype in types
    assert x.shape[1] == in_features


def choose_run(kernel: Kernel, num_multiplications: int, min_parallel: int) -> Callable[..., None]:
    """Return the function that runs the kernel on all threads or, with fewer multiplications than
    `min_parallel`, on this thread, because waking others would take longer."""
    return kernel if num_multiplications < min_parallel else kernel.parallel
