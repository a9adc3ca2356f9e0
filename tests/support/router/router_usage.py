"""Resource use of all processes of a router: the router's own process, or its engine process and workers."""

import psutil

from tests.support.processes import children_of
from tests.support.router.router_process import Setup


class RouterProcesses:
    def __init__(self, setup: Setup) -> None:
        pid = setup.service.process.pid
        children = children_of(pid)
        pids = [*children.get("engine", []), *children.get("router", [])] or [pid]
        self._processes = [psutil.Process(each) for each in pids]

    @property
    def rss(self) -> int:
        """Memory in bytes."""
        return sum(process.memory_info().rss for process in self._processes)

    @property
    def num_fds(self) -> int:
        return sum(process.num_fds() for process in self._processes)

    @property
    def cpu_s(self) -> float:
        """CPU time in seconds since the processes started."""
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)
