"""Check what a plan counts before weights are read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.shard.driver import configure
from tests.support.shard.ranks import ALONE
from tests.support.shard.stepping import read_config
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.speculators.registry import find_cache
from tgis.shard.startup.memory.memory_plan import MIB, CacheTooSmallError
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.prepare import prepare

BLOCK_SIZE = 4096  # so large that two decimals of a MiB differ


class LittleMemory(HostMemory):
    def memory_left(self) -> int:
        return 2 * MIB


def test_blocks_include_the_cache_of_a_speculator(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("grouped_queries")
    settings = {**read_config(directory), "architectures": ["LlamaForCausalLMEagle"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    shown = []
    for speculator in (None, str(tmp_path)):
        config = configure(directory, speculator=speculator, block_size=BLOCK_SIZE)
        plan = prepare(config, replace(ON_CPU, memory=LittleMemory()))
        expected = bytes_per_block(plan.choice.spec, ALONE, BLOCK_SIZE, torch.float32)
        if speculator is not None:
            cache = find_cache(speculator, plan.choice.spec)
            assert cache is not None
            expected += cache.count_bytes(BLOCK_SIZE, torch.float32)
        with pytest.raises(CacheTooSmallError, match=f"tokens and {expected / MIB:.2f} MiB, "):
            plan.check_fit(ALONE)
        shown.append(f"{expected / MIB:.2f}")
    assert shown[0] != shown[1]
