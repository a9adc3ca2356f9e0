"""Splits queries, keys and values, normalises and rotates heads, and writes keys and values to the cache."""

import torch
from torch import Tensor

from tgis.shard.attention.interface import Heads
from tgis.shard.kernels.portable.ops import split_heads


def launch(
    qkv: Tensor, heads: Heads, angles: Tensor | None, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Return the queries, [num_tokens, num_heads, head_dim], of the type of qkv.

    qkv: contiguous [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. angles: float32
    [2, num_tokens, half], see `Attention.run`. keys, values: [num_blocks, num_kv_heads, block_size,
    head_dim], one layer of the cache. slot_mapping: int64 [num_tokens], block * block_size + offset, each
    valid."""
    raise NotImplementedError


def plain(
    qkv: Tensor, heads: Heads, angles: Tensor | None, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> Tensor:
    q, k, v = split_heads(qkv.float(), heads.num_heads, heads.num_kv_heads, angles, heads.norm)
    keep(k, keys, slot_mapping)
    keep(v, values, slot_mapping)
    return q.to(qkv.dtype)


def keep(fresh: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    """Write [num_tokens, num_kv_heads, head_dim] to the cache's pages of one layer."""
    block_size = pages.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    pages[blocks, :, slot_mapping % block_size] = fresh.to(pages.dtype)
