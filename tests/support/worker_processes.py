"""Worker processes of this process, and their memory."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def children(module: str) -> Iterator[int]:
    """Yield the child processes of this process that run a module."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        if module in command:
            yield int(pid)


def memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10
