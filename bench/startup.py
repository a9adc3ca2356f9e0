"""Measures the time from a service's command to readiness, compared with the time to read its weights: with
compiled kernels in the cache, and once without."""

import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import tgis
from bench.rates import service_flags
from bench.service import launch

CHUNK = 1 << 24


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure all starts. Raises BenchError."""
    _time_start(options, model)  # compiles the kernels, and reads the files into memory
    starts, reads = [], []
    for _ in range(options.rounds):
        reads.append(_time_reading(model))
        starts.append(_time_start(options, model))
    with tempfile.TemporaryDirectory() as directory:
        package = Path(tgis.__file__).parent
        shutil.copytree(package, Path(directory) / package.name, ignore=shutil.ignore_patterns("kernels-*"))
        cold_s = _time_start(options, model, Path(directory))
    detail = f"{statistics.median(starts):.1f} s, of which reading the files {statistics.median(reads):.2f}"
    values = [start - read for start, read in zip(starts, reads, strict=True)]
    return {
        "figures": {
            "startup": {"values": values, "detail": detail},
            "startup cold": {"values": [cold_s], "detail": "s until ready, no kernel compiled before"},
        }
    }


def _time_start(options: Namespace, model: Path, directory: Path | None = None) -> float:
    """Return the seconds until the service of the package in `directory` is ready."""
    start = time.perf_counter()
    with launch(model, options.cache / "startup.log", service_flags(options), directory):
        seconds = time.perf_counter() - start
    print(f"ready after {seconds:.1f} s", file=sys.stderr, flush=True)
    return seconds


def _time_reading(model: Path) -> float:
    """Return the seconds to read the weights' files, which are in the page cache if there is room."""
    start, buffer = time.perf_counter(), bytearray(CHUNK)
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start
