"""Sizes the KV cache: it gets the memory that the largest step and a GPU's graphs leave."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from tgis.logs import FIELDS
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.memory import memory_plan
from tgis.shard.startup.memory.memory_plan import GIB, Demand, MemoryBudget
from tgis.shard.startup.memory.warm_up import PLAIN, StepSize, WarmUp, largest_step
from tgis.shard.startup.platforms.interface import Platform

logger = logging.getLogger(__name__)


class Graphs(Protocol):
    """Captured steps by size."""

    @property
    def sizes(self) -> list[GraphSize]: ...

    def capture(self, sizes: Sequence[GraphSize]) -> None:
        """Capture the steps that can be captured and that memory allows."""

    def clear(self) -> None:
        """Drop all graphs."""


@runtime_checkable
class CapturingRunner(ModelRunner, Protocol):
    @property
    def graphs(self) -> Graphs: ...


@dataclass(frozen=True)
class CacheSizing:
    """Builds model runners with caches of increasingly accurate sizes."""

    on: Platform
    group: ProcessGroup
    demand: Demand
    max_step_tokens: int
    block_bytes: int
    adapter_bytes: int
    make_runner: Callable[[int, int], ModelRunner]  # called with the numbers of blocks and of states
    graph_sizes: Sequence[GraphSize] = ()  # sizes of steps to capture, sorted by number of tokens

    def make_sized_runner(self) -> ModelRunner:
        """Compile the kernels, and return a runner whose cache uses the remaining memory.

        Raises ProcessGroupError, UnsupportedModelError, ModelTooLargeError or CacheTooSmallError."""
        if self.on.is_memory_shared:
            budget = self._measure_growing()
            return self.make_runner(self._plan_blocks(budget), self._count_states(budget))
        try:
            budget, sizes = self._measure_largest()
            return self._make_with_graphs(budget, sizes)
        except torch.OutOfMemoryError as error:
            raise memory_plan.ModelTooLargeError(
                f"the model does not fit: the GPU has too little memory for the largest step "
                f"({self._largest_step.num_tokens} tokens) or for the cache; reduce --max-step-tokens, "
                "--max-batch-size or --kv-cache-tokens"
            ) from error

    def _make_small_runner(self) -> ModelRunner:
        """Return a runner with one block and one state, which all rows of a warm-up share."""
        return self.make_runner(1, min(self.demand.wanted_states, 1))

    def _plan_blocks(self, budget: MemoryBudget) -> int:
        return memory_plan.plan_blocks(self.demand, self.block_bytes, budget)

    def _count_states(self, budget: MemoryBudget) -> int:
        return memory_plan.count_states(self.demand, self.block_bytes, budget.share)

    def _budget(self, left: int, step: int, graphs: int = 0) -> MemoryBudget:
        return MemoryBudget(
            left=left,
            step=step,
            num_ranks=self.group.local_size,
            cache_fraction=self.on.cache_fraction,
            adapter_bytes=self.adapter_bytes,
            graphs=graphs,
            margin=self.on.memory.margin(),
        )

    def _measure_growing(self) -> MemoryBudget:
        """Measure steps of increasing size and the memory that they leave."""
        warm_up = self._warm_up(self._make_small_runner())
        warm_up.compile()
        self.on.memory.release_memory()
        left = self.on.memory_left(self.group)

        def is_enough(step: int) -> bool:
            demand = self.demand
            num_states = demand.wanted_states + demand.num_spare_states
            wanted = demand.wanted_blocks * self.block_bytes + num_states * demand.state_bytes
            return self._budget(left, step).share >= wanted

        budget = self._budget(left, warm_up.measure(self._largest_step, is_enough, left))
        memory_plan.check_budget(budget)
        self.on.memory.release_memory()
        return budget

    @property
    def _largest_step(self) -> StepSize:
        return largest_step(self.demand, self.max_step_tokens)

    def _warm_up(self, runner: ModelRunner) -> WarmUp:
        return WarmUp(runner, self.group, self.demand, self.on.memory)

    def _measure_largest(self) -> tuple[MemoryBudget, Sequence[GraphSize]]:
        """Measure the memory of the largest step and the graphs, and the memory that a runner's tables leave.
        Return the budget and the sizes of steps that can be captured."""
        runner = self._make_small_runner()
        warm_up = self._warm_up(runner)
        warm_up.compile(PLAIN)
        warm_up.compile()
        step = warm_up.measure_largest(self._largest_step)
        graphs, sizes = self._try_graphs(runner)
        budget = self._budget(self._find_left(), step, graphs)
        memory_plan.check_budget(budget)
        return budget, sizes

    def _try_graphs(self, runner: ModelRunner) -> tuple[int, Sequence[GraphSize]]:
        """Return the memory of graphs in bytes, and the sizes that can be captured: all sizes, only sizes
        without adapters, of these only sizes without prompt tokens, or none."""
        without_adapters = [size for size in self.graph_sizes if not size.has_adapters]
        without_prompts = [size for size in without_adapters if not size.num_prompt_tokens]
        for sizes in dict.fromkeys(map(tuple, (self.graph_sizes, without_adapters, without_prompts))):
            if sizes and (num_bytes := self._measure_graphs(runner, sizes)) is not None:
                return num_bytes, sizes
        return 0, ()

    def _measure_graphs(self, runner: ModelRunner, sizes: Sequence[GraphSize]) -> int | None:
        """Capture the largest and the smallest step to estimate the memory of all graphs. Return it in bytes,
        or None if they cannot be captured."""
        assert isinstance(runner, CapturingRunner)
        left = [self._find_left()]
        for size in (sizes[-1], sizes[0]):
            runner.graphs.capture([size])
            left.append(self._find_left())
        is_captured = set(runner.graphs.sizes) == {sizes[-1], sizes[0]}
        runner.graphs.clear()
        gc.collect()
        first = left[0] - left[1]
        second = left[1] - left[2]
        return memory_plan.extrapolate_graphs(first, second, len(sizes)) if is_captured else None

    def _find_left(self) -> int:
        self.on.memory.release_memory()
        return self.on.memory_left(self.group)

    def _make_with_graphs(self, budget: MemoryBudget, sizes: Sequence[GraphSize]) -> ModelRunner:
        """Return a runner with captured steps. If the graphs need more memory than planned, reduce its states
        or, if it has none, its cache by the difference."""
        planned = num_blocks, num_states = self._plan_blocks(budget), self._count_states(budget)
        runner, missing = self._capture(*planned, budget, sizes)
        if missing > 0:
            budget = replace(budget, graphs=budget.graphs + missing)
            if num_states:
                num_states = max(1, num_states - -(-missing // self.demand.state_bytes))
            else:
                num_blocks -= -(-missing // self.block_bytes)
            memory_plan.check_blocks(self.demand, num_blocks, self.block_bytes, budget)
            del runner
            logger.info(
                "reduced the cache from %s to %s to fit CUDA graphs",
                *(_describe(*counts) for counts in (planned, (num_blocks, num_states))),
            )
            runner, missing = self._capture(num_blocks, num_states, budget, sizes)
        if missing > 0:
            logger.warning("the largest step lacks %.2f GiB of memory", missing / GIB)
        _log(budget, runner)
        return runner

    def _capture(
        self, num_blocks: int, num_states: int, budget: MemoryBudget, sizes: Sequence[GraphSize]
    ) -> tuple[ModelRunner, int]:
        """Build a runner and capture its steps. Return it and the bytes of memory that are missing."""
        gc.collect()  # an earlier runner may be part of a reference cycle
        self.on.memory.release_memory()
        runner = self.make_runner(num_blocks, num_states)
        if sizes:
            assert isinstance(runner, CapturingRunner)
            runner.graphs.capture(sizes)
            captured = runner.graphs.sizes
            plain = [size for size in captured if not size.has_adapters]
            runner.info.graph_sizes[:] = [size.num_rows for size in plain if not size.num_prompt_tokens]
            runner.info.num_prompt_graphs = sum(size.num_prompt_tokens > 0 for size in plain)
        return runner, memory_plan.count_missing(budget, self._find_left())


def _describe(num_blocks: int, num_states: int) -> str:
    return f"{num_blocks} blocks" + (f" and {num_states} states" if num_states else "")


def _log(budget: MemoryBudget, runner: ModelRunner) -> None:
    fields = {
        "left_gib": round(budget.left / GIB, 2),
        "largest_step_gib": round(budget.step / GIB, 3),
        "graphs_gib": round(budget.graphs / GIB, 3),
        "graphs": len(runner.info.graph_sizes) + runner.info.num_prompt_graphs,
        "blocks": runner.info.num_blocks,
    }
    logger.info("cache sized", extra={FIELDS: fields})
