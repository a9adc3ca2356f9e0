"""Model runners on a late device."""

import math
from collections.abc import Callable

import torch

from tests.support.cuda.late_device import LateDevice
from tgis.config.processes import ShardConfig
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.interface import Model
from tgis.shard.runner.device.build import make_device_runner
from tgis.shard.runner.device.graphs import graph_sizes
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.startup.load import load
from tests.support.shard.portable import plain


def load_late(
    config: ShardConfig, kernels: Implementations | None = None, device: LateDevice | None = None
) -> DeviceModelRunner:
    """Load a model to a late device, whose graphs are to be captured by those who want them."""
    host = load(config, on=plain(torch.device("cpu")))
    assert isinstance(host, HostModelRunner)
    return move(host, config, kernels or Implementations.plain(), device or LateDevice())


def move(
    host: HostModelRunner, config: ShardConfig, kernels: Implementations, device: LateDevice
) -> DeviceModelRunner:
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
    guides = host._guides
    return make_device_runner(
        host.model,
        cache,
        kernels,
        device,
        limits,
        config.max_batch_size,
        guides,
        info,
        host.adapters,
        memory_left=lambda: 1 << 40,
    )
