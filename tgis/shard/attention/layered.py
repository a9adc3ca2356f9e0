"""Attention of a model whose layers have several caches."""

from collections.abc import Callable

from torch import Tensor

from tgis.shard.attention.interface import (
    Attention,
    AttentionKind,
    AttentionPlan,
    Heads,
    Scoring,
    StepLayout,
)
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.memory.layered_cache import AnyCache, LayeredCache


def open_attention(cache: AnyCache, make: Callable[[KVCache], Attention]) -> Attention:
    """Return the attention to a cache, whose parts `make` creates."""
    return LayeredAttention(cache, make) if isinstance(cache, LayeredCache) else make(cache)


class LayeredAttention:
    """Attention that passes each layer to the attention of its cache. Plans depend only on blocks, which all
    caches share."""

    def __init__(self, cache: LayeredCache, make: Callable[[KVCache], Attention]):
        self._parts = [make(each) for each in cache.caches]
        self._places = cache.places

    def plan(self, layout: StepLayout, kind: AttentionKind) -> AttentionPlan:
        return self._parts[0].plan(layout, kind)

    def run(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
    ) -> Tensor:
        cache, own = self._places[layer]
        return self._parts[cache].run(own, qkv, heads, angles, plan, scoring)

    def keep(self, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        cache, own = self._places[layer]
        self._parts[cache].keep(own, k, v, plan)

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        cache, own = self._places[layer]
        return self._parts[cache].attend(own, q, plan, scoring)

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        cache, own = self._places[layer]
        return self._parts[cache].read(own, block_table, seq_len)
