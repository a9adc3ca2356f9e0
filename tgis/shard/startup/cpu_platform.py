"""The platform of CPUs. To import it is to import numba."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.cpu.bf16 import self_check
from tgis.shard.kernels.cpu.jit.cache import add_run_directory
from tgis.shard.kernels.cpu.jit.compiler import compile_progress, is_compiling
from tgis.shard.kernels.cpu.ops import CPU_KERNELS, BfloatKernels
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
    cache_fraction=0.25,
)


def on_cpu(kernel_cache: Path | None = None, arithmetic: str = "float32") -> Platform:
    """Return the platform, whose products have this arithmetic. Compiled code goes to `kernel_cache` if there
    is no better place."""
    if kernel_cache is not None:
        add_run_directory(kernel_cache)
    if arithmetic == "float32":
        return ON_CPU
    assert arithmetic == "bfloat16"
    packer = self_check.choose_packer()
    logger.info("matrix products round weights and inputs to bfloat16, and add in float32")
    return replace(
        ON_CPU,
        kernels=BfloatKernels(packer.pack),
        product_dtype=torch.bfloat16,
        replaced_kernels=packer.replaced,
    )
