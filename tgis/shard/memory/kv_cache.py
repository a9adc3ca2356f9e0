"""Paged KV cache, allocated once. Its size depends on the model's shape."""

import math
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tgis.process.memory.background_advice import (
    MADV_HUGEPAGE,
    MADV_POPULATE_WRITE,
    advise,
    advise_slowly,
)

CPU = torch.device("cpu")
SLACK = 32  # elements after the last page, so that kernels can load whole vectors, also of pairs
SCALE_BYTES = 4  # of a scale, float32, of a token's key or value of one head
POPULATED_BYTES = 1 << 21


class AttentionShape(Protocol):
    """Properties of a model that determine the size of its KV cache."""

    @property
    def num_cache_layers(self) -> int:
        """Number of layers with a KV cache."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class LayerHeads(NamedTuple):
    """Heads of keys and values of one layer."""

    num_kv_heads: int
    head_dim: int


@runtime_checkable
class LayeredShape(AttentionShape, Protocol):
    """Shape of a model whose layers may have different heads, or read the keys and values of others."""

    @property
    def layer_heads(self) -> tuple[LayerHeads, ...]: ...
    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layer whose keys and values each layer reads; empty if all read their own."""


class Ranks(Protocol):
    @property
    def size(self) -> int: ...


def local_kv_heads(shape: AttentionShape | LayerHeads, ranks: Ranks) -> int:
    """Return the number of KV heads per rank. With fewer heads than ranks, adjacent ranks hold the same
    head."""
    return max(1, shape.num_kv_heads // ranks.size)


def cached_heads(shape: AttentionShape) -> dict[int, LayerHeads]:
    """Return the heads of each layer that has a cache of its own."""
    if not isinstance(shape, LayeredShape):
        return dict.fromkeys(range(shape.num_cache_layers), LayerHeads(shape.num_kv_heads, shape.head_dim))
    sources = shape.kv_sources or range(shape.num_cache_layers)
    heads = shape.layer_heads
    return {layer: heads[layer] for layer in sorted({*sources})}


def page_size(block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of key elements (or value elements) of one block, layer and head. In a page of
    integers, scales of the block's tokens follow, aligned to their size."""
    size = block_size * head_dim
    if dtype.is_floating_point:
        return size
    return -(-size // SCALE_BYTES) * SCALE_BYTES + block_size * SCALE_BYTES


def bytes_per_block(shape: AttentionShape, ranks: Ranks, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block on one rank, for all layers."""
    num_elements = 0
    for heads in cached_heads(shape).values():
        num_elements += 2 * local_kv_heads(heads, ranks) * page_size(block_size, heads.head_dim, dtype)
    return num_elements * dtype.itemsize


class CacheScale(NamedTuple):
    """Divisors of a layer's keys and values when they are stored."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = CacheScale()


class KVCache:
    """Keys and values, in pages whose layout the attention backend defines. Keys and values of an 8-bit type
    are divided by `scales`, which has one entry per layer; 8-bit integers have scales of their own in the
    pages."""

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
        shape = (num_layers, num_blocks, num_kv_heads, page_size(block_size, head_dim, dtype))
        self.keys, self.values = (allocate_zeros(shape, dtype, device) for _ in range(2))
        if device.type == "cpu":
            _populate_soon((self.keys, self.values))
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.scales = list(scales) or [UNSCALED] * num_layers


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    size = (count + SLACK) * dtype.itemsize
    # The system provides zeroed pages, which cost nothing until they are used.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)[:count].view(shape)


def _populate_soon(memories: Sequence[Tensor]) -> None:
    """Make the system allocate the memory of tensors [num_layers, any] on a background thread, so that
    neither the start nor a later step waits for it. Huge pages are requested because reads of them are
    faster. Memory is allocated block by block over all layers, because steps use blocks in that order."""
    for memory in memories:
        advise(memory.data_ptr(), memory.nbytes, MADV_HUGEPAGE)  # without it, pages are small
    layers = [(layer.data_ptr(), layer.nbytes) for memory in memories for layer in memory]

    def populate() -> None:
        """Populate without torch: a thread inside a torch call when the process ends would abort it."""
        for offset in range(0, max((num_bytes for _, num_bytes in layers), default=0), POPULATED_BYTES):
            for address, num_bytes in layers:
                begin = (address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
                end = address + min(offset + POPULATED_BYTES, num_bytes)
                if begin < end and not advise_slowly(begin, end - begin, MADV_POPULATE_WRITE):
                    return  # out of memory is no error here: the rest may never be used

    threading.Thread(target=populate, name="cache", daemon=True).start()
