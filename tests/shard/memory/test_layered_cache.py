"""Caches of models whose layers have different heads or share keys and values."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.shard.family_cases.llamas import CASES
from tgis.shard.attention.layered import open_attention
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.memory.kv_cache import KVCache, bytes_per_block
from tgis.shard.memory.layered_cache import AnyCache, LayeredCache, allocate_cache
from tgis.shard.models import registry
from tgis.shard.models.spec import DecoderSpec

NUM_BLOCKS, BLOCK_SIZE = 3, 4


def make_spec(case: str) -> DecoderSpec:
    spec = registry.make_spec(CASES[case]().to_dict())
    assert isinstance(spec, DecoderSpec)
    return spec


def allocate(spec: DecoderSpec, num_ranks: int) -> AnyCache:
    ranks = SimpleNamespace(size=num_ranks)
    return allocate_cache(spec, ranks, NUM_BLOCKS, BLOCK_SIZE, torch.float16)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", ["gemma3", "gemma4_text", "gemma4_text_experts"])
def test_a_block_takes_as_many_bytes_as_are_reckoned(case: str, num_ranks: int) -> None:
    spec = make_spec(case)
    cache = allocate(spec, num_ranks)
    parts = cache.caches if isinstance(cache, LayeredCache) else (cache,)
    total = sum(part.keys.nbytes + part.values.nbytes for part in parts)
    reckoned = bytes_per_block(spec, SimpleNamespace(size=num_ranks), BLOCK_SIZE, torch.float16)
    assert total == NUM_BLOCKS * reckoned


def test_layers_without_keys_have_no_cache() -> None:
    """Two of six layers read the keys of others, and layers with full attention have wider heads."""
    cache = allocate(make_spec("gemma4_text"), 1)
    assert isinstance(cache, LayeredCache)
    assert [(part.num_layers, part.head_dim) for part in cache.caches] == [(2, 8), (2, 16)]
    assert cache.places == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1))


def test_models_with_equal_layers_have_one_cache() -> None:
    assert isinstance(allocate(make_spec("gemma3"), 1), KVCache)


def test_a_layer_reads_the_keys_of_its_source() -> None:
    cache = allocate(make_spec("gemma4_text"), 1)
    assert isinstance(cache, LayeredCache)
    cache.caches[1].keys[1] = 2.0
    attention = open_attention(cache, TorchAttention)
    table = torch.arange(NUM_BLOCKS, dtype=torch.int32)
    keys = {layer: attention.read(layer, table, 5)[0] for layer in range(6)}
    assert {layer: float(each.max()) for layer, each in keys.items()} == {0: 0, 1: 0, 2: 0, 3: 2, 4: 0, 5: 2}
    assert keys[5].shape == (2, 5, 16)
