"""Checks the maximum number of LoRA adapters that vLLM's series report."""

import pytest

from tgis.router.adapters.residency import AdapterCache, AdapterEntry
from tgis.router.engine.aliased_state import max_loras
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.sequence import AdapterInfo, AdapterKind

MAX_BATCH_SIZE = 8


@pytest.mark.parametrize(
    ("capacity", "sizes", "expected"),
    [
        (0, [], 0),
        (1000, [], MAX_BATCH_SIZE),
        (1000, [300, 100], 3),
        (1000, [1000], 1),
        (1000, [1], MAX_BATCH_SIZE),
        (1000, [0], MAX_BATCH_SIZE),
    ],
)
def test_as_many_as_fit_of_the_largest_size(capacity: int, sizes: list[int], expected: int) -> None:
    cache = AdapterCache(Metrics(MetricLimits(64, 32, MAX_BATCH_SIZE)).adapters, 1.0)
    cache.capacity = capacity
    for size in sizes:
        info = AdapterInfo(AdapterKind.LORA, f"a{size}", num_bytes=size)
        cache.entries[info.digest] = AdapterEntry(info)
    assert max_loras(cache, MAX_BATCH_SIZE) == expected
