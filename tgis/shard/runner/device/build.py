"""Builds the model runner for a device."""

from collections.abc import Callable

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.memory.state_cache import StateCache
from tgis.shard.models.interface import AdaptableModel, Model
from tgis.shard.models.spec import DecoderSpec, EncoderDecoderSpec
from tgis.shard.models.whole_model import WholeModelSpec
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.device.adapters.slot_assignments import allocate_slots
from tgis.shard.runner.device.device_rows import allocate_rows
from tgis.shard.runner.device.device_step import DeviceModel
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.drafts.build import DeviceSpeculator
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.device.step_packer import StepPacker
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides


def make_device_runner(
    model: Model,
    cache: KVCache,
    kernels: Implementations,
    stream: DeviceStream,
    limits: RowLimits,
    max_rows: int,
    guides: Guides,
    info: pb.InfoResponse,
    adapters: LoadedAdapters,
    memory_left: Callable[[], int],
    states: StateCache | None = None,
    has_adapters: bool = False,
    has_drafts: bool = False,
    agree: Callable[[int], int] = lambda value: value,
    speculator: DeviceSpeculator | None = None,
) -> DeviceModelRunner:
    """Build a runner without graphs. The cache's last block is the dummy block, which `info.num_blocks` does
    not count. The last slot of `states`, those of a model with recurrent layers, is a dummy, too.
    `memory_left` returns the free bytes of the device, and `agree` the smallest of the ranks' values.
    `has_adapters` is true if LoRA adapters may be loaded. With `has_drafts`, graphs also verify drafts."""
    spec = model.spec
    assert isinstance(spec, DecoderSpec | EncoderDecoderSpec | WholeModelSpec), "a shape with heads"
    num_blocks = cache.num_blocks - 1
    group_size = max(1, spec.num_heads // info.world_size // cache.num_kv_heads)
    attention = CudaAttention(cache, kernels, group_size)
    state = allocate_rows(max_rows, limits, num_blocks, stream.device)
    table = DeviceTable(max_rows, limits, stream.device, adapters, state)
    proposer = reader = None
    if speculator is not None:
        reader = speculator.find_reader(model)
        proposer = speculator.make_proposer(model, table, kernels, stream, num_blocks, agree)
    builder = BatchBuilder(table, attention, proposer, singles_first=True, states=states)
    packer = StepPacker(table, attention.tile_tokens, state, None if states is None else states.dummy_slot)
    slots = None
    if has_adapters and isinstance(model, AdaptableModel) and can_use_slots(kernels, model):
        slots = allocate_slots(model.parts, max_rows, stream.device)
    on = DeviceModel(model, attention, kernels, state, limits.rope_switch_len > 0, states, slots, reader)
    described = pb.InfoResponse(num_blocks=num_blocks)
    described.MergeFrom(info)
    described.num_blocks = num_blocks
    return DeviceModelRunner(
        on, stream, builder, packer, guides, described, adapters, memory_left, agree, has_drafts, proposer
    )


def can_use_slots(kernels: Implementations, model: AdaptableModel) -> bool:
    """Return True if adapters are in slots. The fallback of the kernel that reads them does not read them."""
    return "add_low_rank" not in kernels.replaced and not model.parts.weights.has_scaled_matrices
