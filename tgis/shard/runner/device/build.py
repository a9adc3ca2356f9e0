"""Builds the model runner for a device."""

from collections.abc import Callable
from functools import partial

from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.interface import AdaptableModel
from tgis.shard.models.spec import DecoderSpec, EncoderDecoderSpec
from tgis.shard.models.whole_model import WholeModelSpec
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.device.adapters.slot_assignments import allocate_slots
from tgis.shard.runner.device.device_rows import allocate_rows
from tgis.shard.runner.device.device_step import DeviceModel, FixedSteps
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.drafts.build import find_reader, make_proposer
from tgis.shard.runner.device.drafts.captured_speculator import CapturedSpeculator
from tgis.shard.runner.device.graphs import CaptureLimits, StepGraphs
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.device.step_packer import StepPacker
from tgis.shard.runner.device.step_queue import StepQueue
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import Uploads
from tgis.shard.runner.interface import RunnerParts

STAGED_WORDS = 1 << 16  # initial size of an upload slot; a larger upload allocates a larger slot


def make_device_runner(
    parts: RunnerParts, kernels: Implementations, stream: DeviceStream, memory_left: Callable[[], int]
) -> DeviceModelRunner:
    """Build a runner without graphs. The cache's last block is the dummy block, which `parts.info.num_blocks`
    does not count, and the last slot of the states is a dummy, too. `memory_left` returns the free bytes of
    the device."""
    model, cache, states = parts.model, parts.cache, parts.states
    # `engine_choice.find_gpu_obstacle` names these models.
    assert isinstance(cache, KVCache), "models whose layers differ run on the CPU"
    spec = model.spec
    assert isinstance(spec, DecoderSpec | EncoderDecoderSpec | WholeModelSpec), "a shape with heads"
    num_blocks = parts.info.num_blocks
    assert cache.num_blocks == num_blocks + 1, "one block is a dummy"
    group_size = max(1, spec.num_heads // parts.info.world_size // cache.num_kv_heads)
    attention = CudaAttention(cache, kernels, group_size)
    state = allocate_rows(parts.max_rows, parts.limits, num_blocks, stream.device)
    table = DeviceTable(parts.max_rows, parts.limits, stream.device, parts.adapters, state)
    speculator = make_proposer(parts, table, kernels, stream)
    builder = BatchBuilder(table, attention, speculator, singles_first=True, states=states)
    packer = StepPacker(table, attention.tile_tokens, state, None if states is None else states.dummy_slot)
    slots = None
    if parts.has_adapters and isinstance(model, AdaptableModel) and can_use_slots(kernels, model):
        slots = allocate_slots(model.parts, parts.max_rows, stream.device)
    on = DeviceModel(
        model,
        attention,
        kernels,
        state,
        has_long=parts.limits.rope_switch_len > 0,
        states=states,
        slots=slots,
        reader=find_reader(parts),
    )
    uploads = Uploads(stream, STAGED_WORDS)
    fixed = FixedSteps(on, packer, uploads, stream)
    graphs = StepGraphs(
        stream,
        fixed.make_parts,
        CaptureLimits(memory_left, parts.group.min),
        has_drafts=parts.has_drafts,
        proposals=speculator.graphs if isinstance(speculator, CapturedSpeculator) else None,
        simplify=partial(dependent_launch.stop, stream.device),
    )
    steps = StepQueue(on, stream, packer, uploads, fixed, graphs)
    return DeviceModelRunner(parts, on, stream, builder, steps, speculator)


def can_use_slots(kernels: Implementations, model: AdaptableModel) -> bool:
    """Return True if adapters are in slots. The fallback of the kernel that reads them does not read them."""
    return "add_low_rank" not in kernels.replaced and not model.parts.weights.has_scaled_matrices
