"""Sets the number of threads and the allocator's options, once, before the model is loaded."""

import ctypes

import torch

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def configure(num_threads: int) -> None:
    """Compute with `num_threads` threads, and keep freed memory for the next step instead of returning it.

    By default glibc maps every large buffer anew, and the page faults take ten times as long as filling
    it."""
    torch.set_num_threads(num_threads)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
