"""Check how memory limits are read, from copies of the files that containers see, and on this machine."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.file_trees import write
from tgis.shard.memory.host_limits import HostMemory

MIB = 1 << 20


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


def test_the_peak_memory_of_this_process() -> None:
    HostMemory().release_memory()
    before, used = HostMemory().begin_peak(), HostMemory().memory_used()
    block = np.ones(64 * MIB, np.uint8)
    assert HostMemory().memory_used() - used == pytest.approx(64 * MIB, rel=0.1)
    del block
    HostMemory().release_memory()
    assert HostMemory().memory_used() - used < 8 * MIB
    assert HostMemory().peak() - before == pytest.approx(64 * MIB, rel=0.2)
