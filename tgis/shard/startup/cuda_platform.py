"""The platform of a GPU."""

from pathlib import Path

import torch

from tgis.errors import first_line
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.memory.cuda import CudaMemory
from tgis.shard.startup.host_runner import HostRunners
from tgis.shard.startup.platform import Compiler, DeviceError, Platform


def on_cuda(device: torch.device, kernel_cache: Path | None, memory_fraction: float | None) -> Platform:
    """Return the platform of a GPU, which becomes torch's current one. Raises DeviceError."""
    memory = _open(device, memory_fraction)
    return Platform(
        device=device,
        kernels=TorchKernels(device),
        make_runner=HostRunners(TorchAttention),
        memory=memory,
        compiler=Compiler(is_compiling=lambda: False, finish=lambda: None),
        is_memory_shared=False,
        cache_divisor=1,
    )


def _open(device: torch.device, memory_fraction: float | None) -> CudaMemory:
    """Compute something, and return the GPU's memory as it is now."""
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add_(1).item()
        return CudaMemory(device, 1.0 if memory_fraction is None else memory_fraction)
    except RuntimeError as error:
        raise DeviceError(f"GPU {device.index} cannot be used: {first_line(error)}") from error
