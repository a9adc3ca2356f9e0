"""The platform of a GPU. To import it is to import triton."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tgis.errors import first_line
from tgis.shard.kernels.cuda.check.self_check import DTYPES, choose_implementations
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.kernel_cache import is_compiling, use_cache
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.memory.cuda import CudaMemory
from tgis.shard.runner.device.build import make_device_runner
from tgis.shard.runner.device.cuda_stream import CudaStream
from tgis.shard.runner.device.graphs import graph_sizes
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.platform import Compiler, DeviceError, Platform, RunnerParts

logger = logging.getLogger(__name__)


def on_cuda(
    device: torch.device, kernel_cache: Path | None, memory_fraction: float | None, dtype: torch.dtype | None
) -> Platform:
    """Return the platform of a GPU, which becomes torch's current one. Raises DeviceError."""
    memory = _open(device, memory_fraction)
    use_cache(kernel_cache)
    implementations = choose_implementations(device, DTYPES if dtype is None else (dtype,))
    return Platform(
        device=device,
        kernels=CudaKernels(device, implementations),
        make_runner=partial(make_runner, implementations, CudaStream(device)),
        memory=memory,
        compiler=Compiler(is_compiling, finish=lambda: None),
        is_memory_shared=False,
        cache_fraction=1,
        num_dummy_blocks=1,
        replaced_kernels=implementations.replaced,
        graph_sizes=partial(choose_graph_sizes, implementations),
    )


def choose_graph_sizes(
    implementations: Implementations, asked: Sequence[int] | None, max_rows: int
) -> Sequence[int]:
    """Return the numbers of rows to capture steps of, as `graph_sizes` does."""
    if "attend_segments" in implementations.replaced:
        # The twin reads as many keys as the longest sequence has. A captured step does not know how many.
        logger.warning("no CUDA graphs: they need the kernel attend_segments, which is replaced")
        return ()
    return graph_sizes(asked, max_rows)


def _open(device: torch.device, memory_fraction: float | None) -> CudaMemory:
    """Compute something, and return the GPU's memory as it is now."""
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add_(1).item()
        return CudaMemory(device, 1.0 if memory_fraction is None else memory_fraction)
    except RuntimeError as error:
        raise DeviceError(f"GPU {device.index} cannot be used: {first_line(error)}") from error


def make_runner(
    implementations: Implementations, stream: DeviceStream, on: Platform, parts: RunnerParts
) -> ModelRunner:
    return make_device_runner(
        model=parts.model,
        cache=parts.cache,
        kernels=implementations,
        stream=stream,
        limits=parts.limits,
        max_rows=parts.max_rows,
        guides=parts.guides,
        info=parts.info,
        adapters=parts.adapters,
        memory_left=on.memory.memory_left,
    )
