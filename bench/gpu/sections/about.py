"""The machine as it was found, and what it lacks."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys

import torch

from bench.gpu.target import Target, parse_target

PACKAGES = (
    ("torch", True),
    ("triton", True),
    ("transformers", True),
    ("numpy", True),
    ("grpcio", True),
    ("grpcio-health-checking", True),
    ("grpcio-reflection", True),
    ("llguidance", True),
    ("cryptography", True),
    ("starlette", True),
    ("uvicorn", True),
    ("prometheus-client", True),
    ("numba", False),
    ("pytest", False),
    ("peft", False),
)
QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def main() -> None:
    target = parse_target("about")
    describe_packages(target)
    target.recorder.fact("python", sys.version.split()[0])
    target.recorder.fact("compiler", shutil.which("gcc") or shutil.which("cc") or "none")
    target.recorder.check("tgis/pb is built", importlib.util.find_spec("tgis.pb.shard_pb2") is not None)
    if target.is_rehearsal:
        return
    if not torch.cuda.is_available():
        target.recorder.problem("gpu", "torch finds none")
        return
    free, total = torch.cuda.mem_get_info(target.device)
    properties = torch.cuda.get_device_properties(target.device)
    target.recorder.fact("gpu", f"{properties.name}, sm_{properties.major}{properties.minor}")
    target.recorder.fact("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    describe_driver(target)


def describe_packages(target: Target) -> None:
    for name, is_needed in PACKAGES:
        try:
            target.recorder.fact(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if is_needed:
                target.recorder.problem(name, "is not installed")
            else:
                target.recorder.fact(name, "not installed")


def describe_driver(target: Target) -> None:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        target.recorder.fact("nvidia-smi", type(error).__name__)
    else:
        target.recorder.fact(QUERY, done.stdout.strip())


if __name__ == "__main__":
    main()
