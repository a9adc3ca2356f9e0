"""The paged KV cache, which is allocated once with a size that depends on the model's shape."""

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CPU = torch.device("cpu")
SLACK = 32  # elements after the last page, so that kernels can load whole vectors, of pairs too
POPULATED_BYTES, LEAST_PRIORITY = 1 << 21, 19
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # Linux's constants


class AttentionShape(Protocol):
    """Properties of a model that determine the size of its KV cache."""

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values in the cache."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Ranks(Protocol):
    @property
    def size(self) -> int: ...


def local_kv_heads(shape: AttentionShape, ranks: Ranks) -> int:
    """Return the number of KV heads per rank. With fewer heads than ranks, neighbours hold the same head."""
    return max(1, shape.num_kv_heads // ranks.size)


def page_size(block_size: int, head_dim: int) -> int:
    """Return the number of elements of the keys, or of the values, of one block, layer and head."""
    return block_size * head_dim


def bytes_per_block(shape: AttentionShape, ranks: Ranks, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block on one rank, over all layers."""
    pages = 2 * shape.num_layers * local_kv_heads(shape, ranks)
    return pages * page_size(block_size, shape.head_dim) * dtype.itemsize


class CacheScale(NamedTuple):
    """Numbers that a layer's keys and values are divided by where they are stored."""

    key: float = 1.0
    value: float = 1.0


class KVCache:
    """Keys and values, in pages whose layout the attention backend defines. Those of a type of 8 bits are
    divided by `scales`, one of each layer."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        scales: Sequence[CacheScale] = (),
    ):
        shape = (num_layers, num_blocks, num_kv_heads, page_size(block_size, head_dim))
        self.keys, self.values = (_allocate_zeros(shape, dtype, device) for _ in range(2))
        if device.type == "cpu":
            _populate_soon((self.keys, self.values))
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.scales = list(scales) or [CacheScale()] * num_layers


def _allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    size = (count + SLACK) * dtype.itemsize
    # The system gives zeroed pages, which cost nothing until they are used.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)[:count].view(shape)


def _populate_soon(memories: Sequence[Tensor]) -> None:
    """Make the system allocate the memory of tensors [num_layers, any] on a background thread, so that
    neither the start nor a later step waits for it. Huge pages are used if there are any, because they are
    read faster. The beginnings of all layers come first, because blocks are used in that order."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    for memory in memories:
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), MADV_HUGEPAGE)

    layers = [(layer.data_ptr(), layer.nbytes) for memory in memories for layer in memory]

    def populate() -> None:
        """Populate without torch: a thread inside a torch call when the process ends would abort it."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        for offset in range(0, max(num_bytes for _, num_bytes in layers), POPULATED_BYTES):
            for address, num_bytes in layers:
                begin = (address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
                end = address + min(offset + POPULATED_BYTES, num_bytes)
                if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_POPULATE_WRITE):
                    return  # memory that cannot be allocated now may never be needed

    threading.Thread(target=populate, name="cache", daemon=True).start()
