"""The platform of a GPU. To import it is to import triton."""

from functools import partial
from pathlib import Path

import torch

from tgis.errors import first_line
from tgis.shard.kernels.cuda import jit
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.self_check import choose_implementations
from tgis.shard.memory.cuda import CudaMemory
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.encoder_decoder import EncoderDecoderModel
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.host_runner import HostRunners
from tgis.shard.startup.platform import Compiler, DeviceError, Platform, RunnerParts


def on_cuda(device: torch.device, kernel_cache: Path | None, memory_fraction: float | None) -> Platform:
    """Return the platform of a GPU, which becomes torch's current one. Raises DeviceError."""
    memory = _open(device, memory_fraction)
    jit.use_cache(kernel_cache)
    implementations = choose_implementations(device)
    return Platform(
        device=device,
        kernels=CudaKernels(device, implementations),
        make_runner=partial(_make_runner, implementations),
        memory=memory,
        compiler=Compiler(jit.is_compiling, finish=lambda: None),
        is_memory_shared=False,
        cache_divisor=1,
        num_dummy_blocks=1,
        replaced_kernels=implementations.replaced,
    )


def _open(device: torch.device, memory_fraction: float | None) -> CudaMemory:
    """Compute something, and return the GPU's memory as it is now."""
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add_(1).item()
        return CudaMemory(device, 1.0 if memory_fraction is None else memory_fraction)
    except RuntimeError as error:
        raise DeviceError(f"GPU {device.index} cannot be used: {first_line(error)}") from error


def _make_runner(implementations: Implementations, on: Platform, parts: RunnerParts) -> ModelRunner:
    model = parts.model
    assert isinstance(model, Decoder | EncoderDecoderModel), "other engines compute on the CPU"
    num_heads = model.spec.num_heads // model.parts.group.size  # of this rank

    def attend(cache: KVCache) -> CudaAttention:
        return CudaAttention(cache, implementations, num_heads // cache.num_kv_heads)

    return HostRunners(attend)(on, parts)
