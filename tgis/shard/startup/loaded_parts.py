"""Parts of a model runner that are loaded before its KV cache is sized, and the runners made of them."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

from tgis.config.cuda_graphs import parse_graph_sizes
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.memory.layered_cache import AnyCache, allocate_cache
from tgis.shard.memory.state_cache import StateCache
from tgis.shard.models.interface import Model
from tgis.shard.models.parts.states import find_state_shape
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import DraftParts, ModelRunner, RunnerParts
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides
from tgis.shard.speculators.draft_head import DraftHead
from tgis.shard.speculators.draft_model import DraftModel
from tgis.shard.speculators.interface import Speculator
from tgis.shard.speculators.registry import AnySpeculator, DraftCache
from tgis.shard.startup.load_plan import LoadPlan
from tgis.shard.startup.memory.cache_size import CacheSizing
from tgis.shard.startup.memory.memory_plan import GIB, KIB, MIB, Demand

logger = logging.getLogger(__name__)

# Maximum time in which several ranks find out whether graphs may contain their collectives.
CAPTURE_PROBE_S = 120.0
# Sequences that may have drafts in a step of a model with states. Each of their tokens needs a spare state.
MAX_DRAFTING_ROWS = 8
ALONE = ProcessGroup(0, 1)  # every rank has the whole speculator
TimeLimit = Callable[[float], AbstractContextManager[None]]
"""Function of a number of seconds. Returns a context; the process ends if it is open for longer."""


def no_limit(_: float) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class LoadedParts:
    """Parts of a model runner except its KV cache."""

    plan: LoadPlan
    info: pb.InfoResponse
    model: Model
    group: ProcessGroup
    guides: Guides
    adapters: LoadedAdapters
    speculator: AnySpeculator | None
    limit_time: TimeLimit

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, including what a speculator keeps."""
        size, dtype = self.plan.demand.block_size, self.plan.cache_type.dtype
        return bytes_per_block(self.model.spec, self.group, size, dtype) + self.draft_bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of a block that a speculator keeps."""
        cache = DraftCache.of(self.speculator)
        plan = self.plan
        return 0 if cache is None else cache.count_bytes(plan.demand.block_size, plan.cache_type.dtype)

    @cached_property
    def can_capture(self) -> bool:
        """True if steps use only the platform's kernels, of which the collectives of ranks may be part."""
        if not self.plan.choice.is_native or self.group.size == 1:
            return self.plan.choice.is_native
        with self.limit_time(CAPTURE_PROBE_S):
            obstacle = self.plan.on.find_rank_obstacle(self.group)
        if obstacle is not None and self.plan.on.device.type == "cuda":
            logger.warning("no CUDA graphs: the ranks' sums cannot be part of them: %s", obstacle)
        return obstacle is None

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters may be loaded."""
        return bool(self.plan.limits.adapter_bytes)

    @property
    def graph_sizes(self) -> Sequence[GraphSize]:
        """Sizes of steps to capture as CUDA graphs."""
        if not self.can_capture:
            return ()
        config = self.plan.config
        configured = parse_graph_sizes(config.cuda_graphs)
        # In an encoder-decoder model, the decoder's prompt is a single token.
        prompt_tokens = 0 if self.model.spec.is_encoder_decoder else config.max_step_tokens
        max_rows = self.plan.demand.max_batch_size
        return self.plan.on.graph_sizes(configured, max_rows, prompt_tokens, self.has_adapters)

    @cached_property
    def demand(self) -> Demand:
        """Demand of the plan, with spare states for drafts if the model keeps states."""
        planned = self.plan.demand
        if self.speculator is None or not planned.state_bytes:
            return planned
        num_spares = self.max_drafting_rows * (self.speculator.num_tokens + 1)
        return replace(planned, num_spare_states=num_spares)

    @property
    def max_drafting_rows(self) -> int:
        """Maximum number of rows with drafts in a step; 0 if the model keeps no states or nothing proposes
        drafts."""
        demand = self.plan.demand
        if self.speculator is None or not demand.state_bytes:
            return 0
        return min(MAX_DRAFTING_ROWS, demand.max_batch_size)

    def make_sized_runner(self) -> ModelRunner:
        """Return a runner whose cache uses the remaining memory.

        Raises ProcessGroupError, UnsupportedModelError, ModelTooLargeError or CacheTooSmallError."""
        plan = self.plan
        sizing = CacheSizing(
            on=plan.on,
            group=self.group,
            demand=self.demand,
            max_step_tokens=plan.config.max_step_tokens,
            block_bytes=self.block_bytes,
            adapter_bytes=plan.limits.num_bytes,
            make_runner=self._make_runner,
            graph_sizes=self.graph_sizes,
        )
        runner = sizing.make_sized_runner()
        self._log_states(runner)
        self._log_drafts(runner)
        return runner

    def _make_runner(self, num_blocks: int, num_states: int) -> ModelRunner:
        on = self.plan.on
        cache = self._allocate_cache(num_blocks)
        states = self._allocate_states(num_states)
        can_propose = bool(self.plan.config.speculate) or self.speculator is not None
        parts = RunnerParts(
            model=self.model,
            cache=cache,
            states=states,
            guides=self.guides,
            adapters=self.adapters,
            info=self._describe_sized(num_blocks, num_states),
            limits=self._limit_rows(),
            max_rows=self.plan.demand.max_batch_size,
            can_capture=self.can_capture,
            group=self.group,
            has_drafts=can_propose and states is None,
            speculator=self._open_speculator(num_blocks),
            has_adapters=self.has_adapters,
        )
        return on.make_runner(on, parts)

    def _allocate_cache(self, num_blocks: int) -> AnyCache:
        return allocate_cache(
            self.model.spec,
            self.group,
            num_blocks + self.plan.on.num_dummy_blocks,
            self.plan.demand.block_size,
            self.plan.cache_type.dtype,
            self.group.device,
            self.plan.cache_type.scales,
        )

    def _allocate_states(self, num_states: int) -> StateCache | None:
        """Return the memory of states, or None if the model keeps none."""
        on = self.plan.on
        shape = find_state_shape(self.model.spec, self.group.size, on.state_chunk)
        if shape is None:
            return None
        num_slots = num_states + on.num_dummy_blocks
        return StateCache(shape, num_slots, self.group.device, self.demand.num_spare_states)

    def _describe_sized(self, num_blocks: int, num_states: int) -> pb.InfoResponse:
        info = pb.InfoResponse(num_blocks=num_blocks, num_states=num_states)
        info.MergeFrom(self.info)
        info.max_drafts = 0 if self.speculator is None else self.speculator.num_tokens
        info.max_drafting_rows = self.max_drafting_rows
        return info

    def _limit_rows(self) -> RowLimits:
        spec, demand = self.model.spec, self.plan.demand
        return RowLimits(
            demand.max_sequence_length,
            demand.block_size,
            spec.vocab_size,
            spec.rope_switch_len,
            spec.is_encoder_decoder,
        )

    def _open_speculator(self, num_blocks: int) -> Speculator | DraftParts | None:
        speculator = self.speculator
        if not isinstance(speculator, DraftModel | DraftHead):
            return speculator
        spec = speculator.spec if isinstance(speculator, DraftHead) else speculator.model.spec
        plan = self.plan
        cache = allocate_cache(
            spec,
            ALONE,
            num_blocks + plan.on.num_dummy_blocks,
            plan.demand.block_size,
            plan.cache_type.dtype,
            plan.on.device,
        )
        return DraftParts(speculator, cache, plan.config.max_step_tokens)

    def _log_states(self, runner: ModelRunner) -> None:
        num_states, spares = runner.info.num_states, self.demand.num_spare_states
        if num_states:
            logger.info(
                "states of sequences take %.2f GiB (float32): %d of %.2f MiB%s",
                (num_states + spares) * self.demand.state_bytes / GIB,
                num_states,
                self.demand.state_bytes / MIB,
                f", and {spares} for drafts" if spares else "",
            )

    def _log_drafts(self, runner: ModelRunner) -> None:
        """Log what a speculator takes of the cache."""
        if self.draft_bytes:
            logger.info(
                "the speculator's keys, values and states take %.2f GiB of the KV cache: %.1f of the %.1f "
                "KiB of each block",
                runner.info.num_blocks * self.draft_bytes / GIB,
                self.draft_bytes / KIB,
                self.block_bytes / KIB,
            )
