"""Measures a rank's memory while it reads a checkpoint, and afterwards. It runs as a child process with a
MemoryJob on stdin, and prints a JSON object."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tgis.hub import model_files
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.models import registry


@dataclass(frozen=True)
class MemoryJob:
    model: str
    """Directory of the checkpoint."""
    dtype: str


def measure_loading(job: MemoryJob) -> dict[str, float]:
    """Bytes of the weights' files; maximum memory while reading, minus the memory before; memory that
    remains; seconds. Memory-mapped pages of files count as memory, as they do for `VmHWM`."""
    directory = Path(job.model)
    settings = model_files.read_json(directory, "config.json")
    memory = HostMemory()
    before, used, began = memory.begin_peak(), memory.memory_used(), time.perf_counter()
    model = registry.load(directory, settings, ProcessGroup(0, 1), getattr(torch, job.dtype))
    seconds, peak = time.perf_counter() - began, memory.peak() - before
    memory.release_memory()
    kept = memory.memory_used() - used
    assert model.spec.vocab_size == settings["vocab_size"]
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return {
        "file_bytes": sum(file.stat().st_size for file in files),
        "peak_bytes": peak,
        "kept_bytes": kept,
        "seconds": seconds,
    }


def main() -> None:
    job = MemoryJob(**json.load(sys.stdin))
    print(json.dumps(measure_loading(job)))


if __name__ == "__main__":
    main()
