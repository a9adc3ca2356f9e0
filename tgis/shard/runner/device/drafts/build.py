"""Builds the proposers of speculators on a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.interface import NO_TAPS, Model, SpeculativeModel
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.device.device_step import StateReader
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.drafts.captured_speculator import CapturedSpeculator
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.forward import Forward
from tgis.shard.runner.proposer import FollowingProposer
from tgis.shard.runner.proposers.draft_head import DraftHeadProposer
from tgis.shard.runner.proposers.draft_model import DraftLimits, DraftModelProposer
from tgis.shard.runner.proposers.head_forward import HeadForward
from tgis.shard.speculators.draft_head import DraftHead
from tgis.shard.speculators.draft_model import DraftModel
from tgis.shard.speculators.interface import Speculator


class DraftPages(NamedTuple):
    """Cache of a draft head or model. Its last block is the dummy block."""

    pages: KVCache
    max_step_tokens: int


@dataclass(frozen=True)
class DeviceSpeculator:
    """Speculator of a model on a device."""

    speculator: Speculator | DraftHead | DraftModel
    cache: DraftPages | None  # None: it keeps none

    def find_reader(self, model: Model) -> StateReader | None:
        """Return what the speculator reads of the model, or None if it reads no states."""
        assert isinstance(model, SpeculativeModel), "the speculator was loaded for it"
        if isinstance(self.speculator, DraftHead):
            return StateReader(self.speculator.taps, self.speculator.state_size)
        return None if isinstance(self.speculator, DraftModel) else StateReader(NO_TAPS, model.prompt_width)

    def make_proposer(
        self,
        model: Model,
        table: DeviceTable,
        kernels: Implementations,
        stream: DeviceStream,
        num_blocks: int,
        agree: Callable[[int], int],
    ) -> FollowingProposer:
        assert isinstance(model, SpeculativeModel), "the speculator was loaded for it"
        draft = self.speculator
        if not isinstance(draft, DraftHead | DraftModel):
            return CapturedSpeculator(draft, model.prompt_width, stream, agree, table)
        assert self.cache is not None, "draft heads and models have a cache"
        spec = draft.spec if isinstance(draft, DraftHead) else draft.model.spec
        group_size = spec.num_heads // self.cache.pages.num_kv_heads
        attention = CudaAttention(self.cache.pages, kernels, group_size)
        builder = BatchBuilder(table.share_rows(), attention)
        if isinstance(draft, DraftHead):
            return DraftHeadProposer(HeadForward(draft, attention), builder, num_blocks)
        limits = DraftLimits(num_blocks, self.cache.max_step_tokens)
        return DraftModelProposer(draft, Forward(draft.model, attention), builder, limits)
