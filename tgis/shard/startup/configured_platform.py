"""Opens the platform that the options select for a model."""

import logging
from pathlib import Path

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.kernels.cpu.jit.cache import use_cache_home
from tgis.shard.models.interface import ModelSpec
from tgis.shard.speculators.registry import DraftShape
from tgis.shard.startup.engine_choice import Choice
from tgis.shard.startup.memory.cache_type import find_float8
from tgis.shard.startup.platforms import choose_platform
from tgis.shard.startup.platforms.interface import Platform
from tgis.shard.startup.platforms.requirements import CheckedModel, CpuProducts
from tgis.shard.startup.ranks.group import count_local, find_local_rank

logger = logging.getLogger(__name__)


def choose_device(config: ShardConfig, choice: Choice) -> torch.device:
    """Return the device of this rank. Raises DeviceError."""
    return choose_platform.find_device(
        config.device, find_local_rank(config), count_local(config), choice.gpu_obstacle
    )


def choose_arithmetic(
    config: ShardConfig, choice: Choice, device: torch.device, dtype_name: str, layout: CodeLayout | None
) -> str:
    """Return float32 or bfloat16, where `auto` depends on the processor and on the type of the weights:
    float32 weights keep float32, unless most of them are codes, which have a `layout`."""
    if config.cpu_arithmetic != "auto":
        return config.cpu_arithmetic
    is_rounded = dtype_name != "float32" or layout is not None
    may_differ = device.type == "cpu" and choice.is_native and is_rounded
    if not may_differ or not choose_platform.has_fast_bfloat16(config.cpu_amx == "auto"):
        return "float32"
    if config.rank == 0:
        logger.info(
            "--cpu-arithmetic auto selects bfloat16, which this processor multiplies about twice as fast as "
            "float32, and which changes the perplexity of real models by less than 0.1 %; "
            "--cpu-arithmetic float32 rounds nothing"
        )
    return "bfloat16"


def open_platform(
    config: ShardConfig,
    spec: ModelSpec,
    device: torch.device,
    layout: CodeLayout | None,
    draft: DraftShape | None,
) -> Platform:
    """Return the platform for weights with this layout of codes, or None if they have no codes, and for a
    speculator. Raises DeviceError."""
    if config.rank == 0:
        _warn_of_unused(config, device, layout)
    use_cache_home(config.cache_home)
    return choose_platform.make_platform(
        device,
        kernel_cache=None if config.kernel_cache is None else Path(config.kernel_cache),
        memory_fraction=config.cuda_memory_fraction,
        model=CheckedModel(
            spec,
            config.world_size,
            dtype=None if config.dtype is None else DTYPES[config.dtype],
            layout=layout,
            cache_type=find_float8(config.kv_cache_dtype),
            draft=draft,
        ),
        products=CpuProducts(
            config.cpu_arithmetic,
            layout,
            rounds_activations=config.activations is not None and _find_obstacle(device, layout) is None,
            allows_amx=config.cpu_amx == "auto",
        ),
    )


def _warn_of_unused(config: ShardConfig, device: torch.device, layout: CodeLayout | None) -> None:
    """Log options that have no effect on this device."""
    if device.type == "cpu":
        for name in ("cuda_graphs", "cuda_memory_fraction"):
            if getattr(config, name) is not None:
                logger.warning("--%s has no effect: the model runs on a CPU", name.replace("_", "-"))
    elif config.cpu_arithmetic != "float32":
        logger.warning("--cpu-arithmetic has no effect: the model runs on a GPU")
    reason = _find_obstacle(device, layout)
    if config.activations is not None and reason is not None:
        logger.warning("--activations %s has no effect: %s", config.activations, reason)


def _find_obstacle(device: torch.device, layout: CodeLayout | None) -> str | None:
    """Return why products do not round activations, or None if they can."""
    if device.type != "cpu":
        return "the model runs on a GPU"
    return "the weights are not quantized" if layout is None else None
