"""Attention on the CPU: compiled kernels walk the pages in place, in float32 arithmetic whatever they hold.

A row's result has the same bits alone, in any company, with any number of threads and however its sequence
was cut into chunks; also with any block size of 8, 16, 32 or 64."""

import torch
from torch import Tensor

from tgis.shard.attention.base import TILE, AttentionMetadata, Scoring
from tgis.shard.attention.kernels import ATTEND, HEADS, TOKENS, WRITE
from tgis.shard.attention.product import ROWS
from tgis.shard.cache import LANES, KVCache
from tgis.shard.compiled import as_bits


class CpuAttention:
    def __init__(self, cache: KVCache):
        self._cache, self._attend, self._write = cache, ATTEND[cache.dtype], WRITE[cache.dtype]
        columns, depth = _padded(cache.block_size, LANES), _padded(cache.head_dim, LANES)
        width = cache.dtype.itemsize
        sizes = (cache.num_kv_heads, cache.head_dim, cache.block_size, columns, depth)
        layers = zip(cache.keys, cache.values, strict=True)
        # Per layer what the kernels call `Pages`.
        self._pages = [
            (k.data_ptr(), v.data_ptr(), *sizes, columns * depth * width, width) for k, v in layers
        ]

    def write(self, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        k, v, slots = k.contiguous(), v.contiguous(), metadata.slot_mapping.to(torch.int64).contiguous()
        run = self._write if len(k) <= TOKENS else self._write.spread
        run(*self._pages[layer], len(k), k.data_ptr(), v.data_ptr(), slots.data_ptr())

    def attend(self, layer: int, q: Tensor, metadata: AttentionMetadata, scoring: Scoring) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        tiles, tables, seq_lens = metadata.tiles, metadata.block_tables.contiguous(), metadata.seq_lens
        num_tokens, num_heads, _ = q.shape
        most_rows = _padded(TILE * min(HEADS, num_heads // self._cache.num_kv_heads), ROWS)
        sizes = (num_tokens, num_heads, *tables.shape, len(tiles), most_rows)
        addresses = tuple(x.data_ptr() for x in (q, out, seq_lens, tables, tiles))
        self._attend.spread(*self._pages[layer], *sizes, *addresses, *_rule(scoring))
        return out

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        cache = self._cache
        columns, depth = _padded(cache.block_size, LANES), _padded(cache.head_dim, LANES)
        blocks = block_table[: -(-seq_len // cache.block_size)].long()
        shape = (len(blocks), cache.num_kv_heads)
        k = cache.keys[layer][blocks].view(*shape, depth, columns).transpose(2, 3)
        v = cache.values[layer][blocks].view(*shape, columns, depth)
        k, v = (x[:, :, : cache.block_size, : cache.head_dim].transpose(0, 1) for x in (k, v))
        k, v = (x.flatten(1, 2)[:, :seq_len].float() for x in (k, v))
        return k, v


def _rule(scoring: Scoring) -> tuple[int, ...]:
    """What the kernel calls `Rule`."""
    slopes, bias = scoring.slopes, scoring.bias
    return (
        as_bits(scoring.scale),
        as_bits(scoring.soft_cap or 0.0),
        scoring.window or 0,
        int(scoring.causal),
        0 if slopes is None else slopes.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else bias.shape[1],
    )


def _padded(n: int, step: int) -> int:
    return -(-n // step) * step
