"""The platform of CPUs. To import it is to import numba."""

import logging
from dataclasses import replace
from pathlib import Path

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.cpu.int4.inner_loop import HAS_VNNI
from tgis.shard.kernels.cpu.jit.cache import add_run_directory
from tgis.shard.kernels.cpu.jit.compiler import compile_progress, is_compiling
from tgis.shard.kernels.cpu.ops import CPU_KERNELS, CpuKernels
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.startup.host_runner import HostRunners
from tgis.shard.startup.platform import Compiler, Platform

logger = logging.getLogger(__name__)

ON_CPU = Platform(
    device=CPU,
    kernels=CPU_KERNELS,
    make_runner=HostRunners(CpuAttention, captures_steps=True),
    memory=HostMemory(),
    compiler=Compiler(is_compiling, compile_progress.finish),
    is_memory_shared=True,
    cache_divisor=4,
)


def on_cpu(kernel_cache: Path | None = None, rounds_activations: bool = False) -> Platform:
    """Return the platform, whose products with codes of weights may round activations. Compiled code goes to
    `kernel_cache` if there is no better place."""
    if kernel_cache is not None:
        add_run_directory(kernel_cache)
    if not rounds_activations:
        return ON_CPU
    if not HAS_VNNI:
        logger.warning("--activations int8 has no effect: the processor has no VNNI")
        return ON_CPU
    logger.info("products with integer codes of 4 or 8 bits round activations to 8 bits")
    return replace(ON_CPU, kernels=CpuKernels(rounds_activations))
