"""Locates the control groups (cgroups) of this process, and counts the cores that they allow."""

import math
import os
from pathlib import Path


def count_cores(root: Path = Path("/")) -> int:
    """Return the number of cores in this process's affinity mask, or its CPU quota, rounded up, if that is
    less."""
    cores = [float(len(os.sched_getaffinity(0)))]
    for controller, names in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        for directory in group_directories(root, controller):
            if all((directory / name).is_file() for name in names):
                quota, period = " ".join((directory / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    cores.append(int(quota) / int(period))
    return max(1, math.ceil(min(cores)))


def group_directories(root: Path, controller: str) -> list[Path]:
    """Return the directories of this process's control group and of its parent groups.

    `controller` is a controller of version 1; empty means version 2. In a container, the group's path may
    exist only on the host; the container's own group is then the mount, which is always among the
    directories."""
    mount = root / "sys/fs/cgroup" / controller
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            return [mount / part for part in (group, *group.parents)]
    return []
