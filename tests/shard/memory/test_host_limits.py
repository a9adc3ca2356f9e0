"""How memory and cores are found out, in pictures of the files that containers see; and on this machine."""

from pathlib import Path

import numpy as np
import pytest

from tgis.shard.memory.host_limits import HostMemory, count_cores

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:      8192 kB\nBuffers: 1 kB\n"}
V2 = {"proc/self/cgroup": "0::/kubepods/pod\n", **MACHINE}
V1 = {"proc/self/cgroup": "9:cpu,cpuacct:/a/b\n4:memory:/a/b\n0::/\n", **MACHINE}


def group_v2(
    path: str, limit: str, usage: int, cached: int = 0, active: int = 0, mapped: int = 0
) -> dict[str, str]:
    statistics = f"anon 5\ninactive_file {cached}\nactive_file {active}\nfile_mapped {mapped}\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": statistics}
    return {f"sys/fs/cgroup/{path}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (V2, 8 * MIB),
        ({**V2, **group_v2("kubepods/pod", "max", 7)}, 8 * MIB),
        ({**V2, **group_v2("kubepods/pod", "5000", 2000)}, 3000),
        ({**V2, **group_v2("kubepods/pod", "5000", 2000, cached=500)}, 3500),
        ({**V2, **group_v2("kubepods/pod", "5000", 2000, cached=500, active=300, mapped=100)}, 3700),
        ({**V2, **group_v2("kubepods/pod", "5000", 2000, cached=500, active=300, mapped=400)}, 3500),
        ({**V2, **group_v2("kubepods/pod", "max", 2000), **group_v2("kubepods", "9000", 8000)}, 1000),
        ({**V2, **group_v2("", "5000", 6000)}, 0),
        (V1, 8 * MIB),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n"
                "active_file 2\ntotal_active_file 50\ntotal_mapped_file 20\n",
            },
            1330,
        ),
    ],
)
def test_memory_left(tmp_path: Path, files: dict[str, str], left: int) -> None:
    assert HostMemory(write(tmp_path, files)).memory_left() == left


def test_cores_are_limited_by_a_quota(tmp_path: Path) -> None:
    available = count_cores(write(tmp_path / "none", V2))
    assert available >= 1
    half = {**V2, "sys/fs/cgroup/kubepods/pod/cpu.max": "50000 100000\n"}
    assert count_cores(write(tmp_path / "half", half)) == 1
    unlimited = {**V2, "sys/fs/cgroup/kubepods/pod/cpu.max": "max 100000\n"}
    assert count_cores(write(tmp_path / "unlimited", unlimited)) == available
    old = {
        f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us": f"{value}\n" for name, value in (("quota", 7), ("period", 10))
    }
    assert count_cores(write(tmp_path / "old", {**V1, **old})) == 1
    old = {
        f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us": f"{value}\n"
        for name, value in (("quota", -1), ("period", 10))
    }
    assert count_cores(write(tmp_path / "old_unlimited", {**V1, **old})) == available


def test_the_peak_of_what_this_process_uses() -> None:
    HostMemory().release_memory()
    before, used = HostMemory().begin_peak(), HostMemory().memory_used()
    block = np.ones(64 * MIB, np.uint8)
    assert HostMemory().memory_used() - used == pytest.approx(64 * MIB, rel=0.1)
    del block
    HostMemory().release_memory()
    assert HostMemory().memory_used() - used < 8 * MIB
    assert HostMemory().peak() - before == pytest.approx(64 * MIB, rel=0.2)
