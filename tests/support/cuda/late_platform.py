"""Platform like a GPU's on the CPU: fallback kernels, late work, and graphs."""

from dataclasses import replace
from functools import partial

from tests.support.cuda.late_device import LateDevice
from tests.support.shard.portable import plain
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.runner.graph_sizes import graph_sizes
from tgis.shard.startup.cuda_platform import make_runner
from tgis.shard.startup.platform import Platform


def late_platform(device: LateDevice, kernels: Implementations | None = None) -> Platform:
    kernels = kernels or Implementations.plain()
    return replace(
        plain(CPU),
        kernels=CudaKernels(CPU, kernels),
        make_runner=partial(make_runner, kernels, device),
        is_memory_shared=False,
        cache_fraction=1,
        num_dummy_blocks=1,
        state_chunk=STATE_CHUNK,
        replaced_kernels=kernels.replaced,
        graph_sizes=graph_sizes,
    )
