"""Describes the machine and measures its limits. It runs as a child process, and prints a JSON object."""

import contextlib
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from bench.instructions import PAIRS, QUADS, Instruction

PACKAGES = ("torch", "transformers", "grpcio", "numba", "tokenizers", "numpy")
READ_BYTES = 1 << 30
GEMM_SIZE = 2048
SECONDS = 1.0


def describe_machine() -> dict[str, object]:
    """Return names and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


class Limits:
    """Return the rate of work that only the machine limits, with all of torch's threads; the median of
    several tries, because single tries vary on a shared machine."""

    def __init__(self, read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE):
        self._buffer = _map(read_bytes).fill_(1.0)  # [read_bytes / 4]
        self._matrix = torch.randn(gemm_size, gemm_size)  # [gemm_size, gemm_size]

    def read(self, seconds: float = SECONDS) -> float:
        """Return the bytes per second read while summing a buffer far larger than the caches."""
        return self._buffer.numel() * 4 / _typical_time(lambda: self._buffer.sum(), seconds)

    def gemm(self, seconds: float = SECONDS, dtype: torch.dtype = torch.float32) -> float:
        """Return the operations per second of a product of square matrices of a type."""
        matrix = self._matrix.to(dtype)
        return 2 * len(matrix) ** 3 / _typical_time(lambda: matrix @ matrix, seconds)

    def multiply(self, instruction: Instruction, seconds: float = SECONDS) -> float | None:
        """Return the operations per second of the instruction on registers; None if the processor lacks
        it."""
        if not instruction.is_supported:
            return None
        return instruction.num_operations / _typical_time(instruction.prepare(), seconds)


def _map(num_bytes: int) -> torch.Tensor:
    """Return float32 [num_bytes / 4] in huge pages, if there are any: with small pages, address translation
    takes a part of the bandwidth."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def measure_limits(read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE) -> dict[str, float | None]:
    """Return the limits by name. The last two are None if the processor lacks their instruction."""
    limits = Limits(read_bytes, gemm_size)
    pairs, quads = limits.multiply(PAIRS), limits.multiply(QUADS)
    return {
        "threads": torch.get_num_threads(),
        "read_gb_per_s": limits.read() / 1e9,
        "gemm_gflop_per_s": limits.gemm() / 1e9,
        "bfloat16_gflop_per_s": pairs and pairs / 1e9,
        "int8_gop_per_s": quads and quads / 1e9,
    }


def _typical_time(work: Callable[[], object], seconds: float) -> float:
    """Return the seconds of one run."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    print(json.dumps(describe_machine() | measure_limits()))
