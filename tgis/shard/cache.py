"""The paged memory of keys and values: allocated once, sized by the model's shape."""

import ctypes
import math
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

CPU = torch.device("cpu")
SLACK = 16  # elements behind the last page, for loads of whole vectors
TOUCHED_BYTES, TOUCH_S = 1 << 25, 0.25
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # of Linux


class Shape(Protocol):
    """What of a model's description decides the size of its cache."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Ranks(Protocol):
    @property
    def size(self) -> int: ...


def local_kv_heads(shape: Shape, ranks: Ranks) -> int:
    """Key/value heads that one rank holds. Where they are fewer than ranks, neighbours hold the same one."""
    return max(1, shape.num_kv_heads // ranks.size)


def page_size(block_size: int, head_dim: int) -> int:
    """Elements of the keys, and of the values, of one block, layer and head."""
    return block_size * head_dim


def bytes_per_block(shape: Shape, ranks: Ranks, block_size: int, dtype: torch.dtype) -> int:
    """Memory that a block takes on one rank, all layers together."""
    pages = 2 * shape.num_layers * local_kv_heads(shape, ranks)
    return pages * page_size(block_size, shape.head_dim) * dtype.itemsize


class KVCache:
    """Keys and values of all layers in pages of raw elements, whose order is the attention's affair.

    float32, float16 or bfloat16."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ):
        shape = (num_layers, num_blocks, num_kv_heads, page_size(block_size, head_dim))
        self.keys, self.values = (_allocate(shape, dtype, device) for _ in range(2))
        if device.type == "cpu":
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(_touch, (self.keys, self.values)))
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    size = (count + SLACK) * dtype.itemsize
    # Pages that are new to the process are zeros, at no cost until they are used.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)[:count].view(shape)


def _touch(memory: Tensor) -> None:
    """So that a lack of memory shows now, and no step has to wait for it; where the system is slow to give
    it, for as long as a start may take. In large pages if the system lends them, which are read faster."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    begin, size, deadline = memory.data_ptr(), memory.nbytes, time.monotonic() + TOUCH_S
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_HUGEPAGE)
    for start in range(0, size, TOUCHED_BYTES):
        length = ctypes.c_size_t(min(TOUCHED_BYTES, size - start))
        has_failed = madvise(ctypes.c_void_p(begin + start), length, MADV_POPULATE_WRITE)
        if has_failed or time.monotonic() > deadline:
            return
