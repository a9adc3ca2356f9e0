"""Model runners on a late device."""

import math
from collections.abc import Callable

import torch

from tests.support.cuda.late_device import LateDevice
from tests.support.shard.portable import plain
from tgis.config.processes import ShardConfig
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.runner.device.build import make_device_runner
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.graph_sizes import graph_sizes
from tgis.shard.runner.interface import ModelRunner, RunnerParts
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.interface import Platform


def load_late(
    config: ShardConfig, device: LateDevice | None = None, on: Platform | None = None
) -> DeviceModelRunner:
    """Load a model to a late device without graphs."""
    device = device or LateDevice()
    group = ProcessGroup(0, 1, device=device.device)
    host = load(config, group, on or plain(device.device))
    assert isinstance(host, HostModelRunner)
    return move(host, config, device)


def load_captured(
    config: ShardConfig, on: Platform | None = None, device: LateDevice | None = None
) -> DeviceModelRunner:
    """Load a model to a late device with captured steps."""
    runner = load_late(config, device, on)
    prompt_tokens = 0 if runner.model.spec.is_encoder_decoder else config.max_step_tokens
    runner.graphs.capture(graph_sizes(None, config.max_batch_size, prompt_tokens))
    return runner


ENGINES: dict[str, Callable[[ShardConfig], ModelRunner]] = {
    "host": load,
    "late": load_late,
    "captured": load_captured,
}


def move(
    host: HostModelRunner,
    config: ShardConfig,
    device: LateDevice,
    kernels: Implementations | None = None,
) -> DeviceModelRunner:
    """Create a runner on a late device from a runner on the host. Its cache is empty."""
    spec, info = host.model.spec, host.info
    cache = KVCache(
        spec.num_layers,
        info.num_blocks + 1,
        info.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        getattr(torch, info.cache_dtype),
        device.device,
    )
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)
    limits = RowLimits(
        config.max_sequence_length,
        info.block_size,
        spec.vocab_size,
        spec.rope_switch_len,
        spec.is_encoder_decoder,
    )
    parts = RunnerParts(
        model=host.model,
        cache=cache,
        states=None,
        guides=host._guides,
        adapters=host.adapters,
        info=info,
        limits=limits,
        max_rows=config.max_batch_size,
        can_capture=True,
        group=ProcessGroup(0, 1, device=device.device),
        has_drafts=bool(config.speculate),
    )
    return make_device_runner(parts, kernels or Implementations.plain(), device, lambda: 1 << 40)
