"""Attention on the CPU: pages are walked in place by compiled kernels, float32 arithmetic over whatever they hold."""

import torch
from torch import Tensor

from tgis.shard.attention.base import TILE, AttentionMetadata, Scoring
from tgis.shard.attention.kernels import ATTEND, HEADS, WRITE
from tgis.shard.attention.product import LANES, ROWS
from tgis.shard.cache import KVCache
from tgis.shard.compiled import as_bits


def _padded(n: int, step: int) -> int:
    return -(-n // step) * step


class CpuAttention:
    def __init__(self, cache: KVCache):
        name = str(cache.dtype).removeprefix("torch.")
        self._cache, self._attend, self._write = cache, ATTEND[name], WRITE[name]
        size, page = cache.dtype.itemsize, cache.keys.shape[-1] * cache.dtype.itemsize
        columns, depth = _padded(cache.block_size, LANES), _padded(cache.head_dim, LANES)
        sizes = (cache.num_kv_heads, cache.head_dim, cache.block_size, columns, depth, page, size)
        self._pages = [(k.data_ptr(), v.data_ptr(), *sizes) for k, v in zip(cache.keys, cache.values, strict=True)]

    def write(self, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        k, v, slots = k.contiguous(), v.contiguous(), metadata.slot_mapping.to(torch.int64).contiguous()
        args = (*self._pages[layer], len(k), k.data_ptr(), v.data_ptr(), slots.data_ptr())
        self._write.spread(*args) if len(k) >= 16 else self._write(*args)

    def attend(self, layer: int, q: Tensor, metadata: AttentionMetadata, scoring: Scoring) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        tiles, tables, seq_lens = metadata.tiles, metadata.block_tables.contiguous(), metadata.seq_lens
        num_tokens, num_heads, _ = q.shape
        rows = _padded(TILE * min(HEADS, num_heads // self._cache.num_kv_heads), ROWS)
        self._attend.spread(
            *self._pages[layer], num_tokens, num_heads, *tables.shape, len(tiles), rows,
            0 if scoring.bias is None else scoring.bias.shape[1],
            q.data_ptr(), out.data_ptr(), seq_lens.data_ptr(), tables.data_ptr(), tiles.data_ptr(),
            0 if scoring.slopes is None else scoring.slopes.data_ptr(),
            0 if scoring.bias is None else scoring.bias.data_ptr(),
            as_bits(scoring.scale), as_bits(scoring.soft_cap or 0.0), scoring.window or 0, int(scoring.causal),
        )  # fmt: skip
        return out
