"""Shows the engine's cache and LoRA adapters in vLLM's series."""

from collections.abc import Iterable

from tgis.router.adapters.residency import AdapterCache
from tgis.router.metrics.vllm_series import CacheShape, LoraUse, VllmSeries
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.sequence import Sequence


def follow_engine(vllm: VllmSeries, scheduler: Scheduler, loras: AdapterCache, max_batch_size: int) -> None:
    """Make every scrape read the engine, so that steps need no work for it."""

    def lora_use() -> LoraUse:
        most = max_loras(loras, max_batch_size)
        return LoraUse(most, _lora_ids(scheduler.running), _lora_ids(scheduler.waiting))

    vllm.follow_cache(lambda: CacheShape(scheduler.pool.block_size, scheduler.pool.num_blocks))
    vllm.follow_loras(lora_use)


def max_loras(loras: AdapterCache, max_batch_size: int) -> int:
    """Return how many adapters as large as the largest one fit into the shards, at most one per sequence."""
    if not loras.capacity:
        return 0
    largest = max((entry.info.num_bytes for entry in loras.entries.values()), default=0)
    return min(loras.capacity // largest, max_batch_size) if largest else max_batch_size


def _lora_ids(sequences: Iterable[Sequence]) -> list[str]:
    return sorted({each.adapters.lora_id for each in sequences if each.adapters.lora is not None})
