"""The device that a section runs on, and the sizes: a GPU's, or those of a rehearsal on the CPU, which shows
only that the script runs."""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.results import Recorder
from bench.shapes import Shape

SHAPES = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, tie_embeddings=False, max_length=16384),
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, max_length=16384),
}
TINY = Shape(2, 64, 4, 2, 16, 128, 512, tie_embeddings=False, max_length=512)


@dataclass(frozen=True)
class Target:
    device: torch.device
    seconds: float  # after which no further measurement begins
    recorder: Recorder
    path: Path
    began: float

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def shape(self, name: str) -> Shape:
        return TINY if self.is_rehearsal else SHAPES[name]

    def synchronize(self) -> None:
        if not self.is_rehearsal:
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], object], repeats: int = 20, warm: int = 3) -> float:
        """Return the median seconds of `work` on the device."""
        for _ in range(warm):
            work()
        self.synchronize()
        return statistics.median(self._time_once(work) for _ in range(2 if self.is_rehearsal else repeats))

    def _time_once(self, work: Callable[[], object]) -> float:
        if self.is_rehearsal:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def parse_target(section: str) -> Target:
    """Read the options that `python -m bench.gpu` gives to a section."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.gpu.sections.{section}")
    parser.add_argument("--results", type=Path, required=True, help="file to append to")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal")
    options = parser.parse_args()
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    recorder = Recorder(section, options.results)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    return Target(device, options.seconds, recorder, options.results, time.monotonic())
