"""Measures the memory that this process may use and has used. The limits are those of the machine and of
every control group (cgroup) that contains the process, such as a container's."""

import contextlib
import ctypes
from pathlib import Path

from tgis.process.control_groups import group_directories

# Names of the limit, the usage, and the file pages within the usage (inactive, active, mapped by a process),
# in control groups of version 2 and version 1.
MEMORY_V2 = ("memory.max", "memory.current", "inactive_file", "active_file", "file_mapped")
MEMORY_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
)
STATUS = Path("/proc/self/status")


class HostMemory:
    """Memory of the machine and its control groups, read from `proc` and `sys` below `root`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def memory_left(self) -> int:
        return min([_read_bytes(self._root / "proc/meminfo", "MemAvailable"), *_groups_left(self._root)])

    def margin(self) -> int:
        return 0

    def release_memory(self) -> None:
        release_memory()

    def memory_used(self) -> int:
        return _read_bytes(STATUS, "RssAnon")  # without mapped files

    def begin_peak(self) -> int:
        with contextlib.suppress(OSError):  # on failure `peak` covers the whole process: an upper bound
            Path("/proc/self/clear_refs").write_text("5")
        return _read_bytes(STATUS, "VmRSS")

    def peak(self) -> int:
        return _read_bytes(STATUS, "VmHWM")


def release_memory() -> None:
    """Give the allocator's free memory back to the system, if the C library supports that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read_bytes(file: Path, name: str) -> int:
    lines = file.read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _groups_left(root: Path) -> list[int]:
    groups = [_group_left(directory, MEMORY_V2) for directory in group_directories(root, "")]
    groups += [_group_left(directory, MEMORY_V1) for directory in group_directories(root, "memory")]
    return [bytes_left for bytes_left in groups if bytes_left is not None]


def _group_left(directory: Path, names: tuple[str, ...]) -> int | None:
    """Return the bytes left in a group, or None if it has no limit or cannot be read. File pages that no
    process has mapped count as free, even active ones: pages of a checkpoint are active once read twice."""
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
