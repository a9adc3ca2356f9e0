"""Chooses the platform and imports only that one: CPU kernels import numba, GPU kernels import triton."""

import logging
from pathlib import Path

import torch

from tgis.process.gpus import has_gpus
from tgis.shard.collectives import CPU
from tgis.shard.startup.platforms.interface import DeviceError, Platform
from tgis.shard.startup.platforms.requirements import FLOAT32_PRODUCTS, CheckedModel, CpuProducts

logger = logging.getLogger(__name__)


def find_device(option: str, rank: int, size: int, obstacle: str | None = None) -> torch.device:
    """Return the device of rank `rank` of the `size` ranks on this machine.

    `option` is cpu, cuda or auto; auto selects GPUs if torch can use them and there is no `obstacle`, which
    is the reason why GPUs cannot run the model. Raises DeviceError."""
    if option == "cpu":
        return CPU
    if not torch.cuda.is_available():
        if option == "cuda":
            raise DeviceError(f"torch cannot use a GPU{_explain()}; --device cpu needs none")
        if has_gpus(None):
            logger.warning("torch cannot use the GPUs of this machine: using the CPU")
        return CPU
    if obstacle is not None:
        leave_gpus(option, obstacle, rank)
        return CPU
    count = torch.cuda.device_count()
    if size > count:
        raise DeviceError(f"{size} shards configured but only {count} GPUs detected")
    return torch.device("cuda", rank % count)


def leave_gpus(option: str, obstacle: str, rank: int = 0) -> None:
    """Log that a model runs on the CPU because of an obstacle. Raises DeviceError if `option` requires
    GPUs."""
    if option == "cuda":
        raise DeviceError(f"GPUs cannot run this model: {obstacle}; use --device cpu or auto")
    if rank == 0:
        logger.warning("the model runs on the CPU, because GPUs cannot run it: %s", obstacle)


def has_fast_bfloat16(may_use_amx: bool) -> bool:
    """Return True if this processor multiplies bfloat16 numbers faster than float32."""
    from tgis.shard.startup.platforms.cpu import has_fast_bfloat16

    return has_fast_bfloat16(may_use_amx)


def import_platform(option: str) -> None:
    """Import the CPU's platform if `option`, as in `find_device`, selects it for every model. This takes a
    while, and needs no model."""
    if option == "cpu" or not torch.cuda.is_available():
        import tgis.shard.startup.platforms.cpu  # noqa: F401


def make_platform(
    device: torch.device,
    kernel_cache: Path | None = None,
    memory_fraction: float | None = None,
    model: CheckedModel | None = None,
    products: CpuProducts = FLOAT32_PRODUCTS,
) -> Platform:
    """Return the platform of a device. Compiled code is stored in `kernel_cache` if there is no better
    directory. The process may use `memory_fraction` of a GPU's memory, whose kernels are checked for a
    `model`; a CPU computes `products`. Raises DeviceError."""
    if device.type == "cuda":
        from tgis.shard.startup.platforms.cuda import on_cuda

        assert model is not None, "GPU kernels are compiled for a model"
        return on_cuda(device, model, kernel_cache, memory_fraction)
    from tgis.shard.startup.platforms.cpu import on_cpu

    return on_cpu(products, kernel_cache)


def _explain() -> str:
    """Return why torch cannot use GPUs, if the reason is known."""
    if torch.version.cuda is None:
        return ": its build supports only CPUs"
    if not has_gpus(None):
        return ""
    return f": the driver does not work, or is too old for CUDA {torch.version.cuda}"
