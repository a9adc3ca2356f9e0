"""Exports the state of the engine's cache and LoRA adapters under another server's metric names."""

from collections.abc import Iterable

from tgis.router.adapters.residency import AdapterCache
from tgis.router.metrics.aliased_series import AliasedSeries, CacheShape, LoraUse
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.sequence import Sequence


def follow_engine(aliases: AliasedSeries, scheduler: Scheduler, loras: AdapterCache) -> None:
    """Make each scrape read the engine's state, so that steps need not update these series."""

    def lora_use() -> LoraUse:
        maximum = max_loras(loras, scheduler.max_sequences)
        return LoraUse(maximum, _lora_ids(scheduler.running), _lora_ids(scheduler.waiting))

    aliases.follow_cache(lambda: CacheShape(scheduler.pool.block_size, scheduler.pool.num_blocks))
    aliases.follow_loras(lora_use)


def max_loras(loras: AdapterCache, max_batch_size: int) -> int:
    """Return how many adapters of the largest size fit into the shards, at most one per sequence."""
    if not loras.capacity:
        return 0
    largest = max((entry.info.num_bytes for entry in loras.entries.values()), default=0)
    return min(loras.capacity // largest, max_batch_size) if largest else max_batch_size


def _lora_ids(sequences: Iterable[Sequence]) -> list[str]:
    return sorted({each.adapters.lora_id for each in sequences if each.adapters.lora is not None})
