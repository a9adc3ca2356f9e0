"""Platform like a GPU's on the CPU: fallback kernels, late work, and graphs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tests.support.cuda.late_device import LateDevice
from tests.support.shard.portable import plain
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.runner.graph_sizes import GraphSize, add_adapter_sizes, graph_sizes
from tgis.shard.startup.platforms.cuda import make_runner
from tgis.shard.startup.platforms.gpu.capture_probe import find_rank_obstacle
from tgis.shard.startup.platforms.interface import Platform


def late_platform(
    device: LateDevice, kernels: Implementations | None = None, uses_few: bool = False
) -> Platform:
    """Return the platform. `uses_few` selects `multiply_few` for all products of few rows."""
    kernels = kernels or Implementations.plain()
    return replace(
        plain(device.device),
        kernels=CudaKernels(device.device, kernels, uses_few),
        make_runner=partial(make_runner, kernels, device),
        is_memory_shared=False,
        cache_fraction=1,
        num_dummy_blocks=1,
        state_chunk=STATE_CHUNK,
        replaced_kernels=kernels.replaced,
        find_rank_obstacle=partial(find_rank_obstacle, device, replaced=kernels.replaced),
        graph_sizes=partial(_choose_sizes, kernels),
    )


def _choose_sizes(
    kernels: Implementations,
    configured: Sequence[int] | None,
    max_rows: int,
    max_prompt_tokens: int,
    has_adapters: bool,
) -> list[GraphSize]:
    """Return sizes also for fallbacks of the kernels that attend, which a GPU would not capture."""
    sizes = graph_sizes(configured, max_rows, max_prompt_tokens)
    has_adapters &= "add_low_rank" not in kernels.replaced
    return add_adapter_sizes(sizes) if has_adapters else sizes
