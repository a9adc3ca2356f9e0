"""Builds the proposers of speculators on a device."""

from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.interface import NO_TAPS, SpeculativeModel
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.device.device_step import StateReader
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.drafts.captured_speculator import CapturedSpeculator
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.forward import Forward
from tgis.shard.runner.interface import DraftParts, RunnerParts
from tgis.shard.runner.proposer import FollowingProposer
from tgis.shard.runner.proposers.draft_head import DraftHeadProposer
from tgis.shard.runner.proposers.draft_model import DraftLimits, DraftModelProposer
from tgis.shard.runner.proposers.head_forward import HeadForward
from tgis.shard.speculators.draft_head import DraftHead


def find_reader(parts: RunnerParts) -> StateReader | None:
    """Return what the speculator reads of the model, or None if it reads no states."""
    speculator = parts.speculator
    if speculator is None:
        return None
    assert isinstance(parts.model, SpeculativeModel), "the speculator was loaded for it"
    if not isinstance(speculator, DraftParts):
        return StateReader(NO_TAPS, parts.model.prompt_width)
    draft = speculator.draft
    return StateReader(draft.taps, draft.state_size) if isinstance(draft, DraftHead) else None


def make_proposer(
    parts: RunnerParts, table: DeviceTable, kernels: Implementations, stream: DeviceStream
) -> FollowingProposer | None:
    """Return the proposer of the speculator, if there is one. The last block of a draft's cache is the dummy
    block."""
    speculator, num_blocks = parts.speculator, parts.info.num_blocks
    if speculator is None:
        return None
    assert isinstance(parts.model, SpeculativeModel), "the speculator was loaded for it"
    if not isinstance(speculator, DraftParts):
        return CapturedSpeculator(speculator, parts.model.prompt_width, stream, parts.group.min, table)
    draft, cache = speculator.draft, speculator.cache
    assert isinstance(cache, KVCache), "draft models whose layers differ run on the CPU"
    spec = draft.spec if isinstance(draft, DraftHead) else draft.model.spec
    attention = CudaAttention(cache, kernels, spec.num_heads // cache.num_kv_heads)
    builder = BatchBuilder(table.share_rows(), attention)
    if isinstance(draft, DraftHead):
        return DraftHeadProposer(HeadForward(draft, attention), builder, num_blocks)
    limits = DraftLimits(num_blocks, speculator.max_step_tokens)
    return DraftModelProposer(draft, Forward(draft.model, attention), builder, limits)
