"""Describes the device that a case runs on, with sizes for a GPU or for a rehearsal on the CPU, which only
shows that the case runs. Cases import torch themselves."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.results import Recorder

if TYPE_CHECKING:
    import torch

    from bench.shapes import Shape


@dataclass(frozen=True)
class Target:
    device_type: str
    seconds: float  # after which the case is ended
    recorder: Recorder
    path: Path
    began: float

    @cached_property
    def device(self) -> "torch.device":
        import torch

        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        return torch.device("cpu") if self.is_rehearsal else torch.device(self.device_type, 0)

    @property
    def is_rehearsal(self) -> bool:
        return self.device_type == "cpu"

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def shape(self, name: str) -> "Shape":
        from bench.gpu.inputs.shapes import SHAPES, TINY

        return TINY if self.is_rehearsal else SHAPES[name]

    def synchronize(self) -> None:
        import torch

        if not self.is_rehearsal:
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], object], repeats: int = 20, warm: int = 3) -> float:
        """Return the median seconds of `work` on the device."""
        for _ in range(warm):
            work()
        self.synchronize()
        return statistics.median(self._time_once(work) for _ in range(2 if self.is_rehearsal else repeats))

    def time_on_device(self, works: Sequence[Callable[[], object]], repeats: int = 20) -> float:
        """Return the seconds of one of `works` when they follow each other in a graph, without the host's
        launch time."""
        if self.is_rehearsal:
            return self.time(lambda: [work() for work in works]) / len(works)
        import torch

        for work in works:
            work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        return self.time(graph.replay, repeats) / len(works)

    def _time_once(self, work: Callable[[], object]) -> float:
        import torch

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


def make_target(recorder: Recorder, device_type: str, seconds: float) -> Target:
    """Return the target of a case that ends in `seconds`."""
    return Target(device_type, seconds, recorder, recorder.path, time.monotonic())
