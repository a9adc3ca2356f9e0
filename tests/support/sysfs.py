"""Copies of the files in which Linux describes processors."""

from collections.abc import Mapping
from pathlib import Path

from tests.support.file_trees import write


def write_machine(
    root: Path, nodes: Mapping[int, str], cores: Mapping[int, str], name: str = "core_cpus_list"
) -> Path:
    """Write the lists of CPUs of each NUMA node, and of each physical core in the file `name` of each of its
    CPUs. `cores` has the CPUs that are online."""
    files = {f"sys/devices/system/node/node{node}/cpulist": f"{cpus}\n" for node, cpus in nodes.items()}
    for cpu, siblings in cores.items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/{name}"] = f"{siblings}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "0\n"
    if nodes:
        files["sys/devices/system/node/online"] = "0\n"
    return write(root, files | {"proc/self/cgroup": "0::/\n"})


def pairs(num_cores: int) -> dict[int, str]:
    """Return the CPUs of cores with two threads, which Linux numbers after the first threads of all cores."""
    return {cpu: f"{cpu % num_cores},{cpu % num_cores + num_cores}" for cpu in range(2 * num_cores)}


def singles(num_cores: int) -> dict[int, str]:
    """Return the CPUs of cores with one thread."""
    return {cpu: str(cpu) for cpu in range(num_cores)}
