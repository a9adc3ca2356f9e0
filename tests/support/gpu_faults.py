"""Cases of a GPU run that end in every possible way. Each records a figure first."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu.target import Target

FIGURE = "before the fault"


def work(target: Target) -> None:
    target.recorder.figure(FIGURE, 1.0, "s")


def exhaust_resources(target: Target) -> None:
    """Launch a kernel that needs more shared memory than the GPU has."""
    import torch
    import triton

    from tests.support.cuda.toy_kernels import multiply
    from tgis.shard.kernels.cuda.offline.driver import compile_only

    work(target)
    with compile_only(89):
        x = torch.empty(1 << 20, device="meta", dtype=torch.float16)
        triton.jit(multiply)[1,](x, x, x, 128, 128, 256, num_warps=8)


def fail_to_compile(target: Target) -> None:
    import torch
    import triton

    from tests.support.cuda.toy_kernels import multiply
    from tgis.shard.kernels.cuda.offline.driver import compile_only

    work(target)
    with compile_only(90):
        x = torch.empty(64, 64, device="meta")
        triton.jit(multiply)[1,](x, x, x, 64, 64, 63)  # not a power of two


def fail_an_assertion(target: Target) -> None:
    work(target)
    print("what it printed")
    raise AssertionError("3 of 4 rows differ\nrow 1")


def leave(target: Target) -> None:
    work(target)
    sys.exit(7)


def hang(target: Target) -> None:
    """Hang, and ignore requests to end."""
    work(target)
    Path(tempfile.mkdtemp(), "service.log").write_text("what its service logged\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def break_memory(target: Target) -> None:
    work(target)
    ctypes.string_at(0)


def leave_services(target: Target, pids: str) -> None:
    """Leave processes behind: one in its own session, and one whose parent has ended."""
    work(target)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    first = subprocess.Popen(sleep, start_new_session=True)
    options = "start_new_session=True, stdout=-3, stderr=-3"  # so that no pipe stays open
    orphan = f"import subprocess; print(subprocess.Popen({sleep!r}, {options}).pid)"
    second = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, check=True)
    Path(pids).write_text(f"{first.pid} {second.stdout}")


def end_the_keeper(target: Target) -> None:
    work(target)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def import_slowly(target: Target) -> None:
    import tests.support.slow_module  # noqa: F401


def need_a_fresh_process(target: Target) -> None:
    """Fail like torch in a process forked from one that has used CUDA."""
    if sys.argv[0].endswith("forker.py"):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    work(target)


need_a_fresh_process_too = need_a_fresh_process
