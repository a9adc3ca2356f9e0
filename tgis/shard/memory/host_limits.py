"""What memory and how many cores this process may use, and how much memory it has used.

Memory and cores are those of the machine and of every control group around the process, as containers see
them."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

# What control groups of version 2 and 1 call their limit and their usage, and the file pages within it: those
# not used lately, all others, and those of either kind that some process has mapped.
MEMORY_V2 = ("memory.max", "memory.current", "inactive_file", "active_file", "file_mapped")
MEMORY_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
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


def release_memory() -> None:
    """Gives back what the allocator keeps of memory that was freed, where it can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_used() -> int:
    """Bytes this process has in memory, mapped files left out."""
    return _own_memory("RssAnon")


def begin_peak() -> int:
    """Bytes this process has in memory; `peak` is counted from here on, where the system lets us."""
    with contextlib.suppress(OSError):  # then it is that of the process's life: too much, not too little
        Path("/proc/self/clear_refs").write_text("5")
    return _own_memory("VmRSS")


def peak() -> int:
    """The most bytes this process has had in memory since `begin_peak`."""
    return _own_memory("VmHWM")


def _own_memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _machine_left(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024


def _groups_left(root: Path) -> list[int]:
    found = [_group_left(directory, MEMORY_V2) for directory in _groups(root, "")]
    found += [_group_left(directory, MEMORY_V1) for directory in _groups(root, "memory")]
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


def _group_left(directory: Path, names: tuple[str, ...]) -> int | None:
    """None where the group has no limit or cannot be seen. Files' pages that nobody has mapped count as free,
    also those used lately: a checkpoint read for the second time is among them."""
    limit_name, usage_name, *page_names = names
    try:
        limit = (directory / limit_name).read_text().strip()
        usage = int((directory / usage_name).read_text())
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    inactive, active, mapped = (int(statistics.get(name, 0)) for name in page_names)
    return max(0, int(limit) - usage + inactive + max(0, active - mapped))
