"""Measures the time of a step kernel by kernel: the kernels of a kernel graph one by one, or all kernels that
a step calls."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.shapes import Shape
from tgis.shard.kernels.cpu.jit.compiler import Kernel, Launch
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph
from tgis.shard.runner.batch_builder import Batch
from tgis.shard.runner.forward import Forward, Outputs
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.model_runner import HostModelRunner

Parts = dict[str, tuple[float, int]]
"""Seconds and calls per step, by name."""


@dataclass
class Stopwatch:
    """Times of several steps; products are listed by their matrix."""

    shape: Shape
    _steps: list[dict[str, list[float]]] = field(default_factory=list)

    def begin_step(self) -> None:
        self._steps.append(defaultdict(list))

    def add(self, name: str, seconds: float) -> None:
        """Start to count; earlier calls are ignored."""
        if self._steps:
            self._steps[-1][name].append(seconds)

    def read(self) -> Parts:
        """Return the medians."""
        calls = {name: len(spans) for name, spans in self._steps[-1].items()}
        return {
            name: (statistics.median(sum(step[name]) for step in self._steps), count)
            for name, count in calls.items()
        }


def name_call(shape: Shape, kernel: Kernel, args: Sequence[int]) -> str:
    """Return the matrix of a product, whose arguments begin with the number of rows and the two sides of the
    matrix."""
    if not kernel.name.startswith("multiply_") or kernel.name == "multiply_gated":
        return kernel.name
    return _name_products(shape).get(frozenset(args[1:3]), kernel.name)


def _name_products(shape: Shape) -> dict[frozenset[int], str]:
    """Return the products by the sides of their matrices."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        frozenset((hidden, q_size + 2 * kv_size)): "product qkv",
        frozenset((hidden, q_size)): "product o",
        frozenset((hidden, 2 * inner)): "product gate_up",
        frozenset((hidden, inner)): "product down",
        frozenset((hidden, shape.vocab_size)): "product head",
    }


class WatchedForward:
    """Wrapper that measures the time of every forward pass, and keeps the last batch, because arguments of a
    kernel graph refer to its memory."""

    def __init__(self, forward: Forward):
        self.forward, self.model, self.attention = forward, forward.model, forward.attention
        self.seconds: list[float] = []
        self.batch: Batch | None = None

    def __call__(self, batch: Batch, is_tapped: bool = True) -> Outputs:
        self.batch, begin = batch, time.perf_counter()
        outputs = self.forward(batch, is_tapped)
        self.seconds.append(time.perf_counter() - begin)
        return outputs


@contextmanager
def watching(runner: ModelRunner) -> Iterator[WatchedForward]:
    assert isinstance(runner, HostModelRunner)
    forward = runner.forward
    watched = WatchedForward(forward)
    runner.forward = watched  # type: ignore[assignment]
    try:
        yield watched
    finally:
        runner.forward = forward


def profile_graph(graph: KernelGraph, shape: Shape, times: int) -> Parts:
    """Return the times of the kernels, each run separately, without the savings of a replay."""
    calls = Counter(name_call(shape, *launch[:2]) for launch in graph.launches)
    seconds = time_launches(graph, times, lambda launch: name_call(shape, *launch[:2]))
    return {name: (seconds[name], count) for name, count in calls.items()}


def time_launches(
    graph: KernelGraph, times: int, name: Callable[[Launch], str] = lambda launch: launch.kernel.name
) -> dict[str, float]:
    """Return the seconds of a replay's kernels by name, the mean of `times` runs, each kernel run
    separately."""
    spent: dict[str, float] = defaultdict(float)
    for _ in range(times):
        for launch in graph.launches:
            begin = time.perf_counter()
            launch.kernel.parallel(*launch.args)
            spent[name(launch)] += time.perf_counter() - begin
    return {kernel: seconds / times for kernel, seconds in spent.items()}


@contextmanager
def timing_kernels(watch: Stopwatch) -> Iterator[None]:
    """Measure every kernel that a step calls inside the block, for steps without a kernel graph."""
    call, parallel = Kernel.__call__, Kernel.parallel
    is_inside = False

    def timed(work: Callable[..., None]) -> Callable[..., None]:
        def run(kernel: Kernel, *args: int, **options: Any) -> None:
            nonlocal is_inside
            if is_inside:  # with one thread, the one method calls the other
                return work(kernel, *args, **options)
            is_inside, begin = True, time.perf_counter()
            work(kernel, *args, **options)
            watch.add(name_call(watch.shape, kernel, args), time.perf_counter() - begin)
            is_inside = False
            return None

        return run

    Kernel.__call__, Kernel.parallel = timed(call), timed(parallel)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Kernel.__call__, Kernel.parallel = call, parallel  # type: ignore[method-assign]
