"""GPU kernels and attention on the CPU, with fallback kernels or Triton's interpreter."""

from dataclasses import replace

import torch

from tests.support.shard.portable import plain
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.startup.platforms.host_runner import HostRunners
from tgis.shard.startup.platforms.interface import Platform

GROUP_SIZE = 8  # at least the group size of all test models; smaller groups could have longer tiles


def make_platform(implementations: Implementations, device: torch.device = CPU) -> Platform:
    def attend(cache: KVCache) -> CudaAttention:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
        return CudaAttention(cache, implementations, GROUP_SIZE)

    kernels = CudaKernels(device, implementations)
    return replace(
        plain(device),
        kernels=kernels,
        make_runner=HostRunners(attend),
        num_dummy_blocks=1,
        state_chunk=STATE_CHUNK,
    )
