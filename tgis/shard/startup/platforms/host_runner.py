"""Builds model runners with rows and sampling on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass

from tgis.shard.attention.interface import Attention
from tgis.shard.attention.layered import open_attention
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.interface import NO_TAPS, Model, SpeculativeModel, Taps
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.forward import Forward
from tgis.shard.runner.interface import DraftParts, RunnerParts
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.proposer import FollowingProposer
from tgis.shard.runner.proposers.draft_head import DraftHeadProposer
from tgis.shard.runner.proposers.draft_model import DraftLimits, DraftModelProposer
from tgis.shard.runner.proposers.head_forward import HeadForward
from tgis.shard.runner.proposers.speculator import SpeculatorProposer
from tgis.shard.runner.row_table import RowTable
from tgis.shard.speculators.draft_head import DraftHead
from tgis.shard.speculators.interface import StageRunner, run_stage
from tgis.shard.startup.platforms.interface import Platform


@dataclass(frozen=True)
class HostRunners:
    """`Platform.make_runner` for a platform with this attention."""

    attention: Callable[[KVCache], Attention]
    captures_steps: bool = False  # kernels and attention are the CPU's, whose launches can be captured

    def __call__(self, on: Platform, parts: RunnerParts) -> HostModelRunner:
        attention = open_attention(parts.cache, self.attention)
        table = RowTable(parts.max_rows, parts.limits, on.device, parts.adapters)
        forward = self._make_forward(parts.model, attention, parts.can_capture, _find_taps(parts))
        proposer = self._make_proposer(parts, table)
        builder = BatchBuilder(table, attention, proposer, states=parts.states)
        return HostModelRunner(forward, builder, parts.guides, parts.info, parts.adapters, proposer)

    def _make_forward(
        self, model: Model, attention: Attention, can_capture: bool, taps: Taps = NO_TAPS
    ) -> Forward:
        if not (self.captures_steps and can_capture):
            return Forward(model, attention, taps)
        from tgis.shard.runner.graph_forward import GraphForward  # imports numba

        return GraphForward(model, attention, taps)

    def _make_head_forward(self, head: DraftHead, attention: Attention, can_capture: bool) -> HeadForward:
        """Return the forward pass of a head. `can_capture` is True if the served model's embedding and head
        can be captured."""
        if not (self.captures_steps and can_capture):
            return HeadForward(head, attention)
        from tgis.shard.runner.proposers.graph_head_forward import GraphHeadForward  # imports numba

        return GraphHeadForward(head, attention)

    def _make_stages(self, can_capture: bool) -> StageRunner:
        if not (self.captures_steps and can_capture):
            return run_stage
        from tgis.shard.runner.proposers.graph_stages import GraphStages  # imports numba

        return GraphStages()

    def _make_proposer(self, parts: RunnerParts, table: RowTable) -> FollowingProposer | None:
        speculator = parts.speculator
        if speculator is None:
            return None
        assert isinstance(parts.model, SpeculativeModel), "the speculator was loaded for it"
        if not isinstance(speculator, DraftParts):
            return SpeculatorProposer(
                speculator, parts.model.prompt_width, table, self._make_stages(parts.can_capture)
            )
        draft = speculator.draft
        attention = open_attention(speculator.cache, self.attention)
        builder = BatchBuilder(table.share_rows(), attention)
        if isinstance(draft, DraftHead):
            head = self._make_head_forward(draft, attention, parts.can_capture)
            return DraftHeadProposer(head, builder, parts.info.num_blocks)
        # Every rank has the whole model, so its steps use no collectives.
        forward = self._make_forward(draft.model, attention, can_capture=True)
        limits = DraftLimits(parts.info.num_blocks, speculator.max_step_tokens)
        return DraftModelProposer(draft, forward, builder, limits)


def _find_taps(parts: RunnerParts) -> Taps:
    draft = parts.speculator.draft if isinstance(parts.speculator, DraftParts) else None
    return draft.taps if isinstance(draft, DraftHead) else NO_TAPS
