"""Memory followed by an inaccessible page: an access beyond its end kills the process with SIGSEGV."""

import ctypes
import math
import mmap

import torch
from torch import Tensor


def allocate(num_bytes: int) -> Tensor:
    """Return zeroed uint8 [num_bytes] that ends at an inaccessible page."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(whole.data_ptr() + size, mmap.PAGESIZE, 0) == 0
    return whole[size - num_bytes : size]


def empty(*shape: int) -> Tensor:
    """Return float32 memory of a shape that ends at an inaccessible page."""
    return allocate(4 * math.prod(shape)).view(torch.float32).view(shape)
