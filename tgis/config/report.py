"""Writes the report of `--env`, without secrets and without an import of the libraries that it lists."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tgis import __version__
from tgis.config.checks import Setting

PACKAGES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "llguidance", "numba", "safetensors")
VARIABLES = re.compile(r"(HF|HUGGING|TRANSFORMERS|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|PYTORCH|TORCH|OTEL|GRPC)_\w+")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|HEADERS|CREDENTIAL|API_KEY")
USER_PART = re.compile(r"(?<=://)[^/@]*@")  # user name and password in a URL
HIDDEN = "(hidden)"
LIMITS = (
    "memory.max",
    "cpu.max",
    "memory/memory.limit_in_bytes",
    "cpu/cpu.cfs_quota_us",
    "cpu/cpu.cfs_period_us",
)
DEVICE_FIELDS = "name,memory.total,driver_version,compute_cap"
DEVICE_TIMEOUT_S = 10.0
FIRST_GPU = "cuda 0"
KERNEL_CHECK = [sys.executable, "-m", "tgis.shard.kernels.cuda.check.self_check"]  # prints failures as JSON
KERNEL_CHECK_TIMEOUT_S = 120.0  # the kernels may have to be compiled


def describe(settings: Mapping[str, Setting], root: Path = Path("/")) -> str:
    """Return the report without a final newline. `root` is the directory that contains proc and sys."""
    devices = _devices()
    groups = {
        "versions": _versions(),
        "machine": _machine(root),
        "devices": devices,
        "kernels": _kernels() if FIRST_GPU in devices else {},
        "environment": _environment(),
        "settings": {name: f"{shown(one.value)} ({one.source})" for name, one in settings.items()},
    }
    lines: list[str] = []
    for title, entries in groups.items():
        if not entries:
            continue
        lines += [f"{title}:", *(f"  {name}: {text}" for name, text in entries.items())]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def shown(value: Any) -> str:
    """Return a setting's value as text, with credentials in a URL hidden."""
    return "unset" if value is None else USER_PART.sub(f"{HIDDEN}@", str(value))


def _versions() -> dict[str, str]:
    versions = {"tgis-next": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _machine(root: Path) -> dict[str, str]:
    memory = _fields(root / "proc/meminfo")
    cpu = _fields(root / "proc/cpuinfo").get("model name", platform.processor() or "unknown")
    limits = {name: root / "sys/fs/cgroup" / name for name in LIMITS}
    return {
        "system": platform.platform(),
        "cpu": cpu,
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{memory.get('MemAvailable', '?')} available of {memory.get('MemTotal', '?')}",
        **{f"cgroup {name}": text for name, path in limits.items() if (text := _text(path))},
    }


def _devices() -> dict[str, str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return {"cuda": "none (no nvidia-smi)"}
    query = [command, f"--query-gpu={DEVICE_FIELDS}", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=DEVICE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"cuda": f"unknown (nvidia-smi: {type(error).__name__})"}
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        return {"cuda": f"none (nvidia-smi exited with {result.returncode})"}
    return {f"cuda {index}": line for index, line in enumerate(lines)}


def _kernels() -> dict[str, str]:
    """Return the results of the GPU kernels' self-check, which runs in a child process."""
    try:
        result = subprocess.run(KERNEL_CHECK, capture_output=True, text=True, timeout=KERNEL_CHECK_TIMEOUT_S)
        failures_by_device: dict[str, dict[str, str]] = json.loads(result.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"check": f"failed ({type(error).__name__})"}
    except ValueError:
        lines = result.stderr.strip().splitlines() or ["no message"]
        return {"check": f"failed (exited with {result.returncode}: {lines[-1]})"}
    entries: dict[str, str] = {}
    for device, failures in failures_by_device.items():
        entries[device] = f"{len(failures)} replaced" if failures else "all pass the check"
        entries |= {f"{device} {name}": f"replaced: {reason}" for name, reason in failures.items()}
    return entries


def _environment() -> dict[str, str]:
    """Return the variables that libraries read, with secret values hidden."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name))
    values = {name: HIDDEN if SECRET.search(name) else shown(os.environ[name]) for name in names}
    return values or {"variables": "no variable that libraries read is set"}


def _fields(path: Path) -> dict[str, str]:
    """Parse lines `name : value`; the first line of each name is used."""
    values: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), value.strip())
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
