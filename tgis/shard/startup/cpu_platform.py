"""The platform of CPUs. To import it is to import numba."""

from pathlib import Path

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.cpu.jit.cache import add_run_directory
from tgis.shard.kernels.cpu.jit.compiler import compile_progress, is_compiling
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.startup.host_runner import HostRunners
from tgis.shard.startup.platform import Compiler, Platform

ON_CPU = Platform(
    device=CPU,
    kernels=CPU_KERNELS,
    make_runner=HostRunners(CpuAttention, captures_steps=True),
    memory=HostMemory(),
    compiler=Compiler(is_compiling, compile_progress.finish),
    is_memory_shared=True,
    cache_fraction=0.25,
)


def on_cpu(kernel_cache: Path | None = None) -> Platform:
    """Return the platform. Compiled code goes to `kernel_cache` if there is no better place."""
    if kernel_cache is not None:
        add_run_directory(kernel_cache)
    return ON_CPU
