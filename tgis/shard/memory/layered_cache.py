"""KV cache of a model whose layers differ: layers with equal heads share one cache, and layers that read the
keys and values of another layer have none of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tgis.shard.memory.kv_cache import (
    CPU,
    AttentionShape,
    CacheScale,
    KVCache,
    LayeredShape,
    Ranks,
    cached_heads,
    local_kv_heads,
)


class CachePlace(NamedTuple):
    """Place of a layer's keys and values."""

    cache: int
    layer: int  # of that cache


@dataclass(frozen=True)
class LayeredCache:
    caches: tuple[KVCache, ...]
    places: tuple[CachePlace, ...]  # of each layer of the model


AnyCache = KVCache | LayeredCache


def allocate_cache(
    shape: AttentionShape,
    ranks: Ranks,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    scales: Sequence[CacheScale] = (),
) -> AnyCache:
    """Return a rank's cache for a model. `scales` has one entry per layer of the model, or none."""
    heads = cached_heads(shape)
    if not heads:  # of a model without attention: blocks without bytes, whose positions are still counted
        return KVCache(0, num_blocks, block_size, 1, 0, dtype, device)
    groups = {each: [layer for layer in heads if heads[layer] == each] for each in heads.values()}
    caches = tuple(
        KVCache(
            len(layers),
            num_blocks,
            block_size,
            local_kv_heads(each, ranks),
            each.head_dim,
            dtype,
            device,
            [scales[layer] for layer in layers] if scales else (),
        )
        for each, layers in groups.items()
    )
    if len(heads) == shape.num_cache_layers and len(caches) == 1:
        return caches[0]
    places = {
        layer: CachePlace(cache, number)
        for cache, layers in enumerate(groups.values())
        for number, layer in enumerate(layers)
    }
    sources = shape.kv_sources if isinstance(shape, LayeredShape) else ()
    return LayeredCache(caches, tuple(places[layer] for layer in sources or range(shape.num_cache_layers)))
