"""Records the machine's state and missing packages, and checks the features of torch that the engine relies
on."""

import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable

from bench.gpu.target import Target

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "numba",
    "grpcio",
    "llguidance",
    "starlette",
    "uvicorn",
    "peft",
    "vllm",
)
QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def describe_machine(target: Target) -> None:
    for name in PACKAGES:
        target.recorder.fact(name, find_version(name))
    target.recorder.fact("python", sys.version.split()[0])
    target.recorder.fact("compiler", shutil.which("gcc") or shutil.which("cc") or "none")
    target.recorder.fact("compute-sanitizer", shutil.which("compute-sanitizer") or "none")
    if target.is_rehearsal:
        return
    import torch

    properties = torch.cuda.get_device_properties(target.device)
    target.recorder.fact("gpu", f"{properties.name}, sm_{properties.major}{properties.minor}")
    free, total = torch.cuda.mem_get_info(target.device)
    target.recorder.fact("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    if shutil.which(command[0]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
        target.recorder.fact("nvidia-smi", (done.stdout or done.stderr).strip())


def find_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def import_all(target: Target) -> None:
    """Import the libraries of all other cases, so that a missing one is reported first."""
    from bench.gpu.pack.gate import PROGRAMS
    from bench.gpu.stages import list_functions

    modules = {name.partition(":")[0] for name in list_functions()}
    for name in (*PROGRAMS, *sorted(modules)):
        _check(target, f"import {name}", lambda name=name: importlib.import_module(name))  # type: ignore[misc]


def check_products(target: Target) -> None:
    """Check products of 16-bit operands with 32-bit results, as used for the logits."""
    import torch

    a, b = (torch.randn(64, 64, device=target.device).bfloat16() for _ in range(2))
    expected, out = a.double() @ b.double(), torch.empty(64, 64, device=target.device)

    def multiply() -> None:
        product = torch.mm(a, b, out_dtype=torch.float32)
        assert ((product.double() - expected).norm() / expected.norm()).item() < 1e-5

    def multiply_into() -> None:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
        assert ((out.double() - expected).norm() / expected.norm()).item() < 1e-5

    _probe(target, "mm(out_dtype=float32)", multiply)
    _probe(target, "mm(out_dtype=float32, out=)", multiply_into)


def check_pools(target: Target) -> None:
    """Check that the memory of graphs is released, also after a failed capture."""
    if target.is_rehearsal:
        target.recorder.fact("pools", "graphs of the CPU have none")
        return
    import torch

    from tgis.shard.runner.device.cuda_stream import CudaStream

    stream, x = CudaStream(target.device), torch.ones(1 << 20, device=target.device)

    def fail() -> None:
        y = x + 1
        if torch.cuda.is_current_stream_capturing():
            y.sum().item()

    try:
        stream.capture(fail)
    except RuntimeError as error:
        target.recorder.check("a capture that waits is refused", True, str(error).partition("\n")[0])
    else:
        target.recorder.check("a capture that waits is refused", False)

    def add() -> None:
        x.add_(1)

    graph = stream.capture(add)
    before = float(x[0])
    graph.replay()
    target.recorder.check("a capture after a failed one replays", float(x[0]) == before + 1)
    del graph
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(target.device)
    target.recorder.fact("reserved after graphs", f"{reserved / 2**20:.0f} MiB")


def _check(target: Target, key: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        target.recorder.check(key, False, f"{type(error).__name__}: {error}".partition("\n")[0])
    else:
        target.recorder.check(key, True)


def _probe(target: Target, key: str, work: Callable[[], object]) -> None:
    """Check a feature of the GPU that a CPU need not have."""
    if not target.is_rehearsal:
        _check(target, key, work)
        return
    try:
        work()
    except (RuntimeError, TypeError) as error:
        target.recorder.fact(key, f"not on this CPU: {type(error).__name__}: {error}".partition("\n")[0])
    else:
        target.recorder.fact(key, "works on this CPU")
