"""Number of cores, from copies of the files that containers see."""

from pathlib import Path

from tests.support.file_trees import write
from tgis.process.control_groups import count_cores

V2 = {"proc/self/cgroup": "0::/kubepods/pod\n"}
V1 = {"proc/self/cgroup": "9:cpu,cpuacct:/a/b\n4:memory:/a/b\n0::/\n"}


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
