"""Chooses the platform, and imports no other one: the CPU's kernels import numba, those of GPUs triton."""

import logging
from pathlib import Path

import torch

from tgis.process.gpus import has_gpus
from tgis.shard.collectives import CPU
from tgis.shard.models.interface import ModelSpec
from tgis.shard.startup.platform import DeviceError, Platform

logger = logging.getLogger(__name__)


def find_device(asked: str, rank: int, size: int) -> torch.device:
    """Return the device of rank `rank` of the `size` ranks on this machine.

    `asked` is cpu, cuda or auto; auto means GPUs if torch can compute on them. Raises DeviceError."""
    if asked == "cpu":
        return CPU
    if not torch.cuda.is_available():
        if asked == "cuda":
            raise DeviceError(
                f"there is no GPU that torch can compute on{_explain()}; --device cpu needs none"
            )
        if has_gpus(None):
            logger.warning("there are GPUs, but torch cannot compute on them: computing on the CPU")
        return CPU
    count = torch.cuda.device_count()
    if size > count:
        raise DeviceError(f"{size} shards configured but only {count} GPUs detected")
    return torch.device("cuda", rank % count)


def make_platform(
    device: torch.device,
    kernel_cache: Path | None = None,
    memory_fraction: float | None = None,
    dtype: torch.dtype | None = None,
    cpu_arithmetic: str = "float32",
    rounds_activations: bool = False,
    may_use_amx: bool = False,
    spec: ModelSpec | None = None,
    num_ranks: int = 1,
) -> Platform:
    """Return the platform of a device. Compiled code goes to `kernel_cache` if there is no better place. Of a
    GPU's memory, the process may use `memory_fraction`. Its kernels are checked for weights of `dtype`, or if
    that is None, of 16 bits, and for a rank's share of the model `spec`. A CPU's products have
    `cpu_arithmetic`, and those with codes may round activations. AMX is used where it is found, if it may be.
    Raises DeviceError."""
    if device.type == "cuda":
        from tgis.shard.startup.cuda_platform import on_cuda

        assert spec is not None, "a GPU's kernels are compiled for a model"
        return on_cuda(device, kernel_cache, memory_fraction, dtype, spec, num_ranks)
    from tgis.shard.startup.cpu_platform import on_cpu

    return on_cpu(kernel_cache, cpu_arithmetic, rounds_activations, may_use_amx)


def _explain() -> str:
    """Return why torch cannot compute on GPUs, as far as it is known."""
    if torch.version.cuda is None:
        return ": its build is for CPUs only"
    if not has_gpus(None):
        return ""
    return f": the driver does not work, or is too old for CUDA {torch.version.cuda}"
