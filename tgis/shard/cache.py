"""The paged memory of keys and values: allocated once, sized by the model's shape."""

from typing import Protocol

import torch
from torch import Tensor

CPU = torch.device("cpu")
LANES = 8  # both sides of a page are padded to a multiple, for vector loads


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
    return _padded(block_size) * _padded(head_dim)


def _padded(n: int) -> int:
    return -(-n // LANES) * LANES


def bytes_per_block(shape: Shape, ranks: Ranks, block_size: int, dtype: torch.dtype) -> int:
    """Memory that a block takes on one rank, all layers together."""
    pages = 2 * shape.num_layers * local_kv_heads(shape, ranks)
    return pages * page_size(block_size, shape.head_dim) * dtype.itemsize


class KVCache:
    """Keys and values of all layers in pages of raw elements, whose order is the attention's affair.

    float32, float16 or bfloat16. The memory is touched here, so that a lack of it shows now."""

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
        self.keys: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.values: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
