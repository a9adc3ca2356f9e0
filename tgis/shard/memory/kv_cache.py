"""The paged memory of keys and values: allocated once, sized by the model's shape."""

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

CPU = torch.device("cpu")
SLACK = 16  # elements behind the last page, for loads of whole vectors
TOUCHED_BYTES, LEAST_PRIORITY = 1 << 21, 19
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
            _touch_soon((self.keys, self.values))
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


def _touch_soon(memories: Sequence[Tensor]) -> None:
    """Of tensors [num_layers, any], on a thread of its own, so that neither the start waits for the system to
    give the memory nor, later, a step. In large pages if there are any, which are read faster, and in the
    order in which blocks are used: the beginnings of all layers come first."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    for memory in memories:
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), MADV_HUGEPAGE)

    layers = [(layer.data_ptr(), layer.nbytes) for memory in memories for layer in memory]

    def touch() -> None:
        """Without a call of torch: a thread that is in one when the process ends would abort it."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        for offset in range(0, max(num_bytes for _, num_bytes in layers), TOUCHED_BYTES):
            for address, num_bytes in layers:
                begin = (address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
                end = address + min(offset + TOUCHED_BYTES, num_bytes)
                if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_POPULATE_WRITE):
                    return  # what cannot be had beforehand may not be needed

    threading.Thread(target=touch, name="cache", daemon=True).start()
