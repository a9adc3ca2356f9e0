"""Lists and ends the descendants of a process, whatever their session."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GPU_FILE = "/dev/nvidia-uvm"  # CUDA's device files; forked processes may use NVML, which does not need them
POLL_S = 0.02
KILL_S = 5.0  # after which a process that the kernel does not end is left alone


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> int:
    """Kill all descendants, and return their number. Ended processes are reaped."""
    killed: set[int] = set()
    end = time.monotonic() + KILL_S
    while time.monotonic() < end:
        _reap()
        descendants = list_descendants(os.getpid())
        if not descendants:
            break
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(descendants)
        time.sleep(POLL_S)
    return len(killed)


def list_descendants(pid: int) -> list[int]:
    """Return the live descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended in the meantime
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    descendants, below = [], list(children.get(pid, ()))
    while below:
        descendants.append(below.pop())
        below += children.get(descendants[-1], ())
    return descendants


def has_opened_gpu() -> bool:
    """Return True if this process has opened a GPU; a process forked from it cannot use one."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path) == _GPU_FILE:
                return True
    return False


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
