"""How many blocks the cache gets, from the memory the container leaves and what requests could use."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tgis.errors import OperatorError
from tgis.shard.cache import KVCache, Shape, bytes_per_block, local_kv_heads
from tgis.shard.world import World

MIB = 1 << 20
# What control groups of version 2 and 1 call their limit, their usage and the unused file pages within it.
MEMORY_V2 = ("memory.max", "memory.current", "inactive_file")
MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class CacheTooSmallError(OperatorError):
    """A request of full length would not fit; the text is one line that shows the arithmetic."""


@dataclass(frozen=True)
class Demand:
    """What requests could use, and the operator's own bound if there is one."""

    block_size: int
    max_sequence_length: int
    max_batch_size: int
    kv_cache_tokens: int | None

    @property
    def blocks_per_request(self) -> int:
        """Of full length."""
        return -(-self.max_sequence_length // self.block_size)


def make_cache(shape: Shape, world: World, dtype: torch.dtype, demand: Demand) -> KVCache:
    """Of the same number of blocks on every rank; CacheTooSmallError is raised on all of them or on none."""
    block_bytes = bytes_per_block(shape, world, demand.block_size, dtype)
    share = world.min(memory_left() // 4 // world.size)
    num_blocks = count_blocks(demand, block_bytes, share)
    check_blocks(demand, num_blocks, block_bytes, share)
    num_kv_heads = local_kv_heads(shape, world)
    return KVCache(shape.num_layers, num_blocks, demand.block_size, num_kv_heads, shape.head_dim, dtype)


def count_blocks(demand: Demand, block_bytes: int, share: int) -> int:
    """The least of what fits into `share` bytes, what the operator allows and what the largest batch could
    use."""
    bounds = [share // block_bytes, demand.max_batch_size * demand.blocks_per_request]
    if demand.kv_cache_tokens is not None:
        bounds.append(demand.kv_cache_tokens // demand.block_size)
    return min(bounds)


def check_blocks(demand: Demand, num_blocks: int, block_bytes: int, share: int) -> None:
    """Raises CacheTooSmallError unless one request of full length fits."""
    if num_blocks >= demand.blocks_per_request:
        return
    needed = demand.blocks_per_request * block_bytes
    flag = "" if demand.kv_cache_tokens is None else f" and --kv-cache-tokens {demand.kv_cache_tokens}"
    raise CacheTooSmallError(
        f"the cache is too small for one request: --max-sequence-length {demand.max_sequence_length} takes "
        f"{demand.blocks_per_request} blocks of {demand.block_size} tokens and {block_bytes / MIB:.2f} MiB, "
        f"{needed / MIB:.0f} MiB together, but {share / MIB:.0f} MiB (a quarter of the free memory, over the "
        f"ranks){flag} leave room for {num_blocks}"
    )


def memory_left(root: Path = Path("/")) -> int:
    """Bytes this process may still take: what is free in the machine and in each control group it is in."""
    return min([_machine_left(root), *_groups_left(root)])


def count_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: those it is bound to, or what its container's quota allows, rounded up."""
    cores = [float(len(os.sched_getaffinity(0)))]
    for controller, names in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        for directory in _groups(root, controller):
            if all((directory / name).is_file() for name in names):
                quota, period = " ".join((directory / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    cores.append(int(quota) / int(period))
    return max(1, math.ceil(min(cores)))


def _machine_left(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024


def _groups_left(root: Path) -> list[int]:
    found = [_group_left(directory, *MEMORY_V2) for directory in _groups(root, "")]
    found += [_group_left(directory, *MEMORY_V1) for directory in _groups(root, "memory")]
    return [bytes_left for bytes_left in found if bytes_left is not None]


def _groups(root: Path, controller: str) -> list[Path]:
    """This process's group of a version 1 controller, or of version 2 where that is empty, and the groups
    around it. In a container the path may be one that only the host sees; the container's own group is the
    mount."""
    mount = root / "sys/fs/cgroup" / controller
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            return [mount / part for part in (group, *group.parents)]
    return []


def _group_left(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """None where the group has no limit or cannot be seen. Files' pages that nobody uses count as free."""
    try:
        limit = (directory / limit_name).read_text().strip()
        usage = int((directory / usage_name).read_text())
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - usage + int(statistics.get(cache_name, 0)))
