"""Check how measurements set the size of a GPU's cache, on a simulated device that can run out of memory."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.cuda.graph_sizes import of_rows
from tests.support.shard.portable import plain
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.memory.cuda import count_left
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.model_runner import ComputedStep
from tgis.shard.startup.memory.cache_size import CacheSizing
from tgis.shard.startup.memory.memory_plan import (
    GIB,
    MIB,
    CacheTooSmallError,
    Demand,
    MemoryBudget,
    ModelTooLargeError,
    count_missing,
    extrapolate_graphs,
)

BLOCK = 2 * MIB
SIZES = tuple(of_rows(1, 2, 4, 8))
LARGEST = 512  # tokens
DEMAND = Demand(16, 160, 8, None)  # 10 blocks per request, 80 in total


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Exempt the objects of earlier tests from garbage collection, which every test here asks for."""
    gc.freeze()


@dataclass
class Device:
    """A simulated GPU memory, which caches what a step used until it is released."""

    total: int
    used: int = 0
    kept: int = 0
    max_bytes: int = 0  # the peak since the last `begin_peak`, cached memory included
    takes: int = 0  # driver memory for kernels that are loaded at the first step

    def allocate(self, num_bytes: int) -> None:
        if self.used + num_bytes > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.used += num_bytes
        self.kept = min(self.kept, self.total - self.used)
        self.max_bytes = max(self.max_bytes, self.used + self.kept)

    def free(self, num_bytes: int) -> None:
        self.used -= num_bytes
        self.kept += num_bytes

    def memory_left(self) -> int:
        return self.total - self.used - self.kept

    def margin(self) -> int:
        return self.total // 50

    def release_memory(self) -> None:
        self.kept = 0

    def memory_used(self) -> int:
        return self.used

    def begin_peak(self) -> int:
        self.max_bytes = self.used + self.kept
        return self.max_bytes

    def peak(self) -> int:
        return self.max_bytes


@dataclass(frozen=True)
class Costs:
    tables: int = 300 * MIB
    token: int = MIB
    first_graph: int = 200 * MIB
    other_graph: Callable[[int], int] = lambda size: 10 * MIB
    code: int = 90 * MIB  # code of kernels, loaded at the first step
    fails: bool = False


@dataclass
class Graphs:
    device: Device
    costs: Costs
    sizes: list[GraphSize] = field(default_factory=list)
    taken: int = 0

    def capture(self, sizes: Sequence[GraphSize]) -> None:
        if self.costs.fails:
            return
        for size in sorted(set(sizes) - set(self.sizes), reverse=True):
            cost = self.costs.other_graph(size.num_rows) if self.sizes else self.costs.first_graph
            self.device.allocate(cost)
            self.taken += cost
            self.sizes = sorted([*self.sizes, size])

    def clear(self) -> None:
        self.device.free(self.taken)
        self.taken, self.sizes = 0, []


class Runner:
    """A runner that owns memory for its lifetime."""

    max_pending = 1

    def __init__(self, device: Device, costs: Costs, num_blocks: int) -> None:
        self.device, self.costs, self.graphs = device, costs, Graphs(device, costs)
        self.info, self.model, self.adapters = pb.InfoResponse(num_blocks=num_blocks), None, None
        taken = costs.tables + (num_blocks + 1) * BLOCK
        device.allocate(taken)
        weakref.finalize(self, device.free, taken)
        weakref.finalize(self, self.graphs.clear)

    def launch(self, step: pb.StepRequest) -> ComputedStep:
        if not self.device.takes:
            self.device.takes = self.costs.code
            self.device.allocate(self.costs.code)
        num_tokens = sum(np.frombuffer(step.ends, "<i4")) - sum(np.frombuffer(step.starts, "<i4"))
        self.device.allocate(int(num_tokens) * self.costs.token)
        self.device.free(int(num_tokens) * self.costs.token)
        return ComputedStep(pb.StepResponse())

    def reset(self) -> None:
        pass


def size_cache(
    device: Device, costs: Costs = Costs(), cache_fraction: float = 1, **other: Any
) -> tuple[Runner, list[int]]:
    """Return the runner, and the number of blocks of every runner that was made."""
    made: list[int] = []

    def make_runner(num_blocks: int, num_states: int) -> Runner:
        assert num_states == 0
        made.append(num_blocks)
        return Runner(device, costs, num_blocks)

    on = replace(plain(CPU), memory=device, is_memory_shared=False, cache_fraction=cache_fraction)
    options: dict[str, Any] = {"adapter_bytes": 0, "demand": DEMAND, "graph_sizes": SIZES} | other
    group = ProcessGroup(0, 1)
    runner = CacheSizing(
        on=on,
        group=group,
        max_step_tokens=LARGEST,
        block_bytes=BLOCK,
        make_runner=make_runner,  # type: ignore[arg-type]
        **options,
    ).make_sized_runner()
    assert isinstance(runner, Runner)
    return runner, made


LIMITED = Demand(16, 160, 800, None)  # more blocks than fit into memory


def find_free(device: Device) -> int:
    device.release_memory()
    return device.memory_left()


def test_the_cache_has_what_steps_and_graphs_leave() -> None:
    """Check the arithmetic for 4,096 MiB.

    Tables of 300, code of 90, 512 for the steps, graphs of 200 + 3 * 10, and 2 % do not belong to the cache;
    the dummy block and the first measurement's block add 4."""
    device = Device(4 * GIB)
    runner, made = size_cache(device, demand=LIMITED)
    left = 4096 - 300 - 90 - 4 - 512 - 230 - 4 * GIB // 50 / MIB
    assert made == [1, int(left / 2)]
    assert list(runner.info.graph_sizes) == [1, 2, 4, 8]
    assert find_free(device) >= 512 * MIB + device.total // 100


def test_a_share_of_what_steps_and_graphs_leave() -> None:
    device = Device(4 * GIB)
    runner, made = size_cache(device, demand=LIMITED, cache_fraction=0.4)
    left = 4096 - 300 - 90 - 4 - 512 - 230 - 4 * GIB // 50 / MIB
    assert made == [1, int(left * 0.4 / 2)]
    assert list(runner.info.graph_sizes) == [1, 2, 4, 8]


def test_no_more_than_requests_can_use() -> None:
    _, made = size_cache(Device(64 * GIB))
    assert made == [1, 80]


def test_soft_prompts_and_adapters_keep_their_share() -> None:
    without, with_them = Device(4 * GIB), Device(4 * GIB)
    [_, more] = size_cache(without, demand=LIMITED)[1]
    [_, fewer] = size_cache(with_them, demand=LIMITED, adapter_bytes=256 * MIB)[1]
    assert more - fewer == 128


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_few_graphs(sizes: tuple[int, ...]) -> None:
    device = Device(4 * GIB)
    runner, made = size_cache(device, demand=LIMITED, graph_sizes=of_rows(*sizes))
    graphs = 200 * len(sizes)
    assert made == [1, int((4096 - 300 - 90 - 4 - 512 - graphs - 4 * GIB // 50 / MIB) / 2)]
    assert list(runner.info.graph_sizes) == list(sizes)


def test_a_model_that_cannot_be_captured_gets_the_memory() -> None:
    device = Device(4 * GIB)
    runner, made = size_cache(device, Costs(fails=True), demand=LIMITED)
    assert made == size_cache(Device(4 * GIB), demand=LIMITED, graph_sizes=())[1]
    assert not runner.info.graph_sizes


def test_graphs_that_take_more_than_planned_shrink_the_cache_once() -> None:
    """Check graphs whose smallest size takes 10 MiB while the sizes between take 200."""
    device = Device(4 * GIB)
    costs = Costs(other_graph=lambda size: 10 * MIB if size == 1 else 200 * MIB)
    runner, made = size_cache(device, costs, demand=LIMITED)
    assert len(made) == 3
    lack = 2 * 190 * MIB - (device.margin() - device.margin() // 2)
    assert made[1] - made[2] == pytest.approx(lack / BLOCK, abs=3)
    assert find_free(device) >= 512 * MIB + device.margin() // 2
    assert list(runner.info.graph_sizes) == [1, 2, 4, 8]


def test_a_cache_that_shrinks_below_one_request_is_refused() -> None:
    def cost(size: int) -> int:
        return 10 * MIB if size == 1 else 200 * MIB

    taken = 300 + 90 + 4 + 512 + 230 + 24
    with pytest.raises(
        CacheTooSmallError, match=r"less 512 MiB for the largest step less \d+ MiB for CUDA gr"
    ):
        size_cache(Device(int(taken * MIB / 0.98)), Costs(other_graph=cost))


def test_the_part_that_does_not_fit_is_named() -> None:
    with pytest.raises(
        ModelTooLargeError,
        match=r"the GPU has too little memory for the largest step \(512 tokens\) or for the c",
    ):
        size_cache(Device(800 * MIB))
    with pytest.raises(ModelTooLargeError) as error:
        size_cache(Device(1150 * MIB))
    assert "the largest step takes 0.50 GiB and CUDA graphs take 0.22 GiB and 0.02 GiB stay free" in str(
        error.value
    )
    assert "or --cuda-graphs" in str(error.value)
    with pytest.raises(CacheTooSmallError, match=r"less 230 MiB for CUDA graphs less 24 MiB that stay free"):
        size_cache(Device(1175 * MIB))


def _cost(least: int, size: int) -> int:
    return (least + size) * MIB


def _draw(count: int) -> Iterator[tuple[Device, Costs, int]]:
    rng = random.Random(0)
    for _ in range(count):
        costs = Costs(
            tables=rng.randrange(0, 900) * MIB,
            token=rng.randrange(1, 4) * MIB // 2,
            first_graph=rng.randrange(1, 900) * MIB,
            other_graph=partial(_cost, rng.randrange(60)),
            code=rng.randrange(1, 200) * MIB,
        )
        yield Device(rng.randrange(3, 12) * GIB), costs, rng.randrange(0, 500) * MIB


def test_whatever_is_taken_the_largest_step_has_memory_in_the_end() -> None:
    shrunk, served = 0, 0
    for device, costs, adapter_bytes in _draw(100):
        try:
            _, made = size_cache(device, costs, demand=LIMITED, adapter_bytes=adapter_bytes)
        except (ModelTooLargeError, CacheTooSmallError):
            continue
        free = find_free(device)
        needed = LARGEST * costs.token + adapter_bytes + device.margin() // 2
        assert free >= needed
        assert made[-1] == 8000 or free - needed < device.margin() // 2 + 3 * BLOCK + 200 * MIB
        shrunk, served = shrunk + (len(made) == 3), served + 1
    assert served > 80
    assert shrunk == 0, "other graphs take up to 7 MiB more than the smallest, which the margin covers"


def test_graphs_share_the_memory_of_the_first_one() -> None:
    assert extrapolate_graphs(0, 0, 0) == 0
    assert extrapolate_graphs(100, 0, 1) == 100
    assert extrapolate_graphs(100, 7, 24) == 100 + 23 * 7
    assert extrapolate_graphs(-3, -5, 24) == 0, "memory that other processes released"


def test_the_missing_memory_is_reported() -> None:
    budget = MemoryBudget(
        left=1000, step=100, num_ranks=2, cache_fraction=1, adapter_bytes=30, graphs=50, margin=20
    )
    assert budget.taken == 2 * (100 + 30 + 50 + 20)
    assert count_missing(budget, 2 * 140) == 0
    assert count_missing(budget, 2 * 100) == 40


@pytest.mark.parametrize(
    ("free_at_start", "free", "fraction", "left"),
    [
        (100, 100, 1.0, 100),
        (100, 30, 1.0, 30),
        (100, 100, 0.5, 50),
        (100, 70, 0.5, 20),
        (100, 40, 0.5, 0),
        (60, 60, 0.5, 50),  # another process uses 40
        (30, 30, 0.5, 30),
        (60, 65, 0.5, 50),  # it has released some
    ],
)
def test_a_share_of_the_memory(free_at_start: int, free: int, fraction: float, left: int) -> None:
    assert count_left(100, free_at_start, free, fraction) == left
