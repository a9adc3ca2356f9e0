"""Chooses the platform and imports only that one: CPU kernels import numba, GPU kernels import triton."""

import logging
from pathlib import Path

import torch

from tgis.process.gpus import has_gpus
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.collectives import CPU
from tgis.shard.models.interface import ModelSpec
from tgis.shard.speculators.registry import DraftShape
from tgis.shard.startup.platforms.interface import DeviceError, Platform

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
    dtype: torch.dtype | None = None,
    cpu_arithmetic: str = "float32",
    rounds_activations: bool = False,
    may_use_amx: bool = False,
    spec: ModelSpec | None = None,
    num_ranks: int = 1,
    multiplies_int8: bool = False,
    multiplies_codes: bool = False,
    multiplies_rounded: bool = False,
    layout: CodeLayout | None = None,
    cache_type: torch.dtype | None = None,
    draft: DraftShape | None = None,
) -> Platform:
    """Return the platform of a device. Compiled code is stored in `kernel_cache` if there is no better
    directory. The process may use `memory_fraction` of a GPU's memory. A GPU's kernels are checked for
    weights of `dtype` (None: the 16-bit types), for codes of `layout`, for a cache of `cache_type` (None: the
    weights' type), for a rank's share of the model `spec`, and for a speculator of the shape `draft`. A CPU's
    matrix products use `cpu_arithmetic`; products with codes round activations if `rounds_activations` is
    set, and AMX is used if it is available and `may_use_amx` is set, in int8 products if the model
    `multiplies_int8`, in products with other codes if it `multiplies_codes`, and in those that round
    activations if it `multiplies_rounded` ones. Raises DeviceError."""
    if device.type == "cuda":
        from tgis.shard.startup.platforms.cuda import on_cuda

        assert spec is not None, "GPU kernels are compiled for a model"
        weights = dtype, spec, num_ranks, layout, cache_type, draft
        return on_cuda(device, kernel_cache, memory_fraction, *weights)
    from tgis.shard.startup.platforms.cpu import on_cpu

    multiplies = (multiplies_int8, multiplies_codes, multiplies_rounded)
    return on_cpu(kernel_cache, cpu_arithmetic, rounds_activations, may_use_amx, *multiplies)


def _explain() -> str:
    """Return why torch cannot use GPUs, if the reason is known."""
    if torch.version.cuda is None:
        return ": its build supports only CPUs"
    if not has_gpus(None):
        return ""
    return f": the driver does not work, or is too old for CUDA {torch.version.cuda}"
