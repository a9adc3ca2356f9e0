"""How long a service takes from its command to being ready, beside what reading its weights takes: with
kernels that were compiled before, and once without."""

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
    """Raises BenchError."""
    _time_start(options, model)  # whatever has to be compiled is, and the files are in memory
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
    """Seconds until it is ready, of the package in `directory`."""
    start = time.perf_counter()
    with launch(model, options.cache / "startup.log", service_flags(options), directory):
        seconds = time.perf_counter() - start
    print(f"ready after {seconds:.1f} s", file=sys.stderr, flush=True)
    return seconds


def _time_reading(model: Path) -> float:
    """Seconds to read the weights' files, which are in the system's memory where there is room."""
    start, buffer = time.perf_counter(), bytearray(CHUNK)
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start
