"""Reads the NUMA nodes and physical cores of the CPUs that this process may use, from Linux's sysfs."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# Files that list the CPUs of a physical core: the name since Linux 5.3, and the older one.
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")


@dataclass(frozen=True)
class NumaNode:
    number: int
    cores: tuple[tuple[int, ...], ...]
    """CPUs of each physical core, as far as this process may use them."""


def read_nodes(allowed: Collection[int], root: Path = Path("/")) -> list[NumaNode]:
    """Return the nodes that have some of the `allowed` CPUs. Without information, all CPUs are on one
    node."""
    devices = root / "sys/devices/system"
    folders = sorted(devices.glob("node/node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    nodes = []
    for folder in folders:
        cpus = set(allowed) & _read_list(folder / "cpulist")  # a node may have memory only
        if cpus:
            nodes.append(NumaNode(int(folder.name[4:]), _group_by_core(cpus, devices)))
    return nodes or [NumaNode(0, _group_by_core(set(allowed), devices))]


def format_list(cpus: Collection[int]) -> str:
    """Return CPUs as Linux writes them, such as 0-3,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _group_by_core(cpus: set[int], devices: Path) -> tuple[tuple[int, ...], ...]:
    cores = {tuple(sorted(cpus & _read_siblings(cpu, devices))) for cpu in cpus}
    return tuple(sorted(cores))


def _read_siblings(cpu: int, devices: Path) -> set[int]:
    """Return all CPUs of a CPU's physical core."""
    for name in _SIBLINGS:
        if siblings := _read_list(devices / f"cpu/cpu{cpu}/topology" / name):
            return siblings | {cpu}
    return {cpu}


def _read_list(path: Path) -> set[int]:
    """Return CPUs that Linux lists in a file, such as 0-3,8; none if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    ranges = [part.split("-") for part in text.split(",") if part]
    return {cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)}
