"""What the machine is and what it can do at most. Run as a child process; prints a JSON object."""

import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "grpcio", "numba", "tokenizers", "numpy")
READ_BYTES = 1 << 30
GEMM_SIZE = 2048
SECONDS = 1.0


def describe_machine() -> dict[str, object]:
    """Names and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def measure_limits(read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE) -> dict[str, float]:
    """The best of several tries, with all of torch's threads: bytes read per second summing a buffer far
    larger than the caches, and float32 operations per second multiplying square matrices."""
    buffer = torch.ones(read_bytes // 4)  # [read_bytes / 4]
    matrix = torch.randn(gemm_size, gemm_size)  # [gemm_size, gemm_size]
    return {
        "threads": torch.get_num_threads(),
        "read_gb_per_s": buffer.numel() * 4 / _best_time(lambda: buffer.sum()) / 1e9,
        "gemm_gflop_per_s": 2 * gemm_size**3 / _best_time(lambda: matrix @ matrix) / 1e9,
    }


def _best_time(work: Callable[[], torch.Tensor]) -> float:
    """Seconds."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    print(json.dumps(describe_machine() | measure_limits()))
