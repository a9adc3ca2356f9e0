"""Platforms of plain torch operators on any device."""

import torch

from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.startup.platforms.host_runner import HostRunners
from tgis.shard.startup.platforms.interface import KernelCompiler, Platform

NOTHING_TO_COMPILE = KernelCompiler(is_compiling=lambda: False, finish=lambda: None)


def plain(device: torch.device) -> Platform:
    return Platform(
        device=device,
        kernels=TorchKernels(device),
        make_runner=HostRunners(TorchAttention),
        memory=HostMemory(),
        compiler=NOTHING_TO_COMPILE,
        is_memory_shared=True,
        cache_fraction=0.25,
    )
