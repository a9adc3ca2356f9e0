"""Builds a model runner that is ready to answer: reads the model, compiles the kernels, and sizes the KV
cache by the memory that is left."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tgis.config.processes import ShardConfig
from tgis.hub import model_files
from tgis.pb import shard_pb2 as pb
from tgis.shard import collectives
from tgis.shard.adapters.loading import Allowance, allow, open_contents, read_names
from tgis.shard.adapters.registry import Contents
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.collectives import LOOPBACK, Meeting, World, WorldError
from tgis.shard.kernels.cpu.jit.compiler import compile_progress
from tgis.shard.memory import host_limits
from tgis.shard.memory.kv_cache import KVCache, bytes_per_block
from tgis.shard.models.interface import Model, ModelSpec, UnsupportedModelError
from tgis.shard.runner.batch_builder import RowTable
from tgis.shard.runner.forward import Forward, GraphForward
from tgis.shard.runner.model_runner import Engine
from tgis.shard.sampling.grammar import Guides, read_tokenizer
from tgis.shard.startup import engine_choice, memory_plan, platform, quantize_check
from tgis.shard.startup.memory_plan import GIB, Demand, Room
from tgis.shard.startup.platform import Platform
from tgis.shard.startup.threads import configure
from tgis.shard.startup.warm_up import WarmUp, largest_step

logger = logging.getLogger(__name__)

# Longest time that a rank waits for another one that is still reading its weights.
MEETING_TIMEOUT_S = 600.0


def load(config: ShardConfig, ranks: World | None = None, on: Platform | None = None) -> Engine:
    """Load the model and return a model runner that is ready for steps.

    If `ranks`, the process group, is None, the ranks connect here. If `on`, the platform, is None, the
    configuration decides it. Raises DeviceError, ModelNotFoundError, UnsupportedModelError, WeightsError,
    WorldError, ModelTooLargeError or CacheTooSmallError."""
    began = time.monotonic()
    directory = Path(config.model_path)
    settings = model_files.read_json(directory, "config.json")
    # Check that the model can be served before anything slow starts.
    choice = _choose_engine(config, settings)
    spec, on = choice.spec, on or _choose_platform(config, choice)
    quantize_check.check(config.quantize, on)
    demand = _demand(config, settings, spec)
    allowance = allow(config, choice.engine == engine_choice.NATIVE, demand.max_sequence_length)
    configure(config.cpu_threads or max(1, host_limits.count_cores() // _num_local(config)))
    dtype = _choose_dtype(config.dtype, settings, choice)
    info = _describe(config, settings, spec, dtype, allowance)
    guides = _start_guides(directory, Path(config.tokenizer_path or directory), spec.vocab_size)
    ranks = ranks or _join(config, on.device)
    _check_fit(config, choice, ranks, dtype, demand, on, allowance)
    before = on.memory.memory_used()
    model = choice.load(ranks, DTYPES[dtype], on.kernels)
    _check_length(model.spec, demand.max_sequence_length)
    host_limits.release_memory()
    weight_gib = (on.memory.memory_used() - before) / GIB
    guides.wait_until_ready()  # keep the tokenizer's memory out of the measurement of a step below
    if allowance.adapter_bytes:
        on.kernels.prepare_adapters()
    contents = open_contents(config, model)
    is_captured = on.captures_steps and choice.engine == engine_choice.NATIVE and ranks.size == 1
    loaded = _Loaded(
        info, model, ranks, guides, demand, DTYPES[dtype], on, contents, allowance.num_bytes, is_captured
    )
    room = loaded.measure_room(config.max_step_tokens)
    compile_progress.finish()
    engine = loaded.make_engine(memory_plan.make_cache(model.spec, ranks, DTYPES[dtype], demand, room))
    num_blocks = engine.info.num_blocks
    logger.info(
        "loaded in %.1f s: memory grew by %.2f GiB with %s weights, %.2f GiB are cache; it holds %d blocks, "
        "%d tokens, %.1f requests of %d tokens",
        *(time.monotonic() - began, weight_gib, info.weight_dtype, num_blocks * loaded.block_bytes / GIB),
        *(num_blocks, num_blocks * demand.block_size, num_blocks / demand.blocks_per_request),
        demand.max_sequence_length,
    )
    return engine


def sequence_length(config: ShardConfig, settings: Mapping[str, Any]) -> int:
    """Return the limit of a sequence's length; `settings` is the model's config.json."""
    return config.max_sequence_length or model_files.max_sequence_length(settings)


@dataclass(frozen=True)
class _Loaded:
    """Parts of a model runner, without its KV cache."""

    info: pb.InfoResponse
    model: Model
    ranks: World
    guides: Guides
    demand: Demand
    dtype: torch.dtype
    on: Platform
    contents: Contents
    contents_bytes: int
    """Largest size that `contents` may grow to."""
    is_captured: bool
    """True if steps may consist of the platform's kernels alone, and so may be captured and replayed."""

    @property
    def block_bytes(self) -> int:
        return bytes_per_block(self.model.spec, self.ranks, self.demand.block_size, self.dtype)

    def make_engine(self, cache: KVCache) -> Engine:
        spec, demand = self.model.spec, self.demand
        table = RowTable(
            demand.max_batch_size,
            demand.max_sequence_length,
            demand.block_size,
            spec.vocab_size,
            self.on.device,
            self.contents,
            rope_switch_len=spec.rope_switch_len,
            is_encoder_decoder=spec.is_encoder_decoder,
        )
        info = pb.InfoResponse(num_blocks=cache.num_blocks)
        info.MergeFrom(self.info)
        forward = (GraphForward if self.is_captured else Forward)(self.model, self.on.attention(cache))
        return Engine(forward, table, self.guides, info, self.contents)

    def measure_room(self, max_step_tokens: int) -> Room:
        """Compile the kernels and measure the memory that is left for caches. Raises WorldError and
        ModelTooLargeError."""
        shape, ranks, demand = self.model.spec, self.ranks, self.demand
        cache = memory_plan.allocate(shape, ranks, self.dtype, demand.block_size, 1)
        warm_up = WarmUp(self.make_engine(cache), ranks, demand, self.on.memory)
        warm_up.compile()
        self.on.memory.release_memory()
        left = self.on.memory_left(ranks)

        def room_beside(step: int) -> Room:
            return Room(left, step, ranks.local_size, self.on.cache_divisor, self.contents_bytes)

        def is_enough(step: int) -> bool:
            return room_beside(step).share >= demand.wanted_blocks * self.block_bytes

        room = room_beside(warm_up.measure(largest_step(demand, max_step_tokens), is_enough, left))
        memory_plan.check_room(room)
        self.on.memory.release_memory()
        return room


def _choose_engine(config: ShardConfig, settings: dict[str, Any]) -> engine_choice.Choice:
    """Choose the engine. Raises UnsupportedModelError and WeightsError."""
    how = (config.deployment_framework, config.world_size, config.trust_remote_code)
    return engine_choice.choose(Path(config.model_path), settings, *how, quantize_check.read(config.quantize))


def _choose_platform(config: ShardConfig, choice: engine_choice.Choice) -> Platform:
    """Choose the platform. Raises DeviceError."""
    on = platform.choose(config.device, _local_rank(config), _num_local(config))
    if on is platform.ON_CPU or choice.engine == engine_choice.NATIVE:
        return on
    logger.warning("%s computes on the CPU only", choice.engine)
    return platform.ON_CPU


def _demand(config: ShardConfig, settings: dict[str, Any], spec: ModelSpec) -> Demand:
    """Return the requests' demand. Raises UnsupportedModelError."""
    length = sequence_length(config, settings)
    _check_length(spec, length)
    return Demand(
        config.block_size,
        length,
        config.max_batch_size,
        config.kv_cache_tokens,
        spec.is_encoder_decoder,
    )


def _check_length(spec: ModelSpec, length: int) -> None:
    """Raise UnsupportedModelError if the model has fewer positions than `length`."""
    if spec.max_positions and length > spec.max_positions:
        text = f"the model has {spec.max_positions} positions; --max-sequence-length {length} is more"
        raise UnsupportedModelError(text)


def _check_fit(
    config: ShardConfig,
    choice: engine_choice.Choice,
    ranks: World,
    dtype: str,
    demand: Demand,
    on: Platform,
    allowance: Allowance,
) -> None:
    """Check that the model fits into memory, before gigabytes are read.

    No rank reads weights before all ranks have looked at the memory that is left."""
    weights = choice.weight_bytes
    if weights is None:
        weights = quantize_check.count_bytes(config, choice, DTYPES[dtype])
    if choice.engine != engine_choice.NATIVE:  # with other engines, every rank holds all weights
        weights *= ranks.size
    weights = weights * ranks.local_size // ranks.size
    left = on.memory_left(ranks)
    beside = (on.cache_divisor, allowance.num_bytes)
    memory_plan.check_fit(choice.spec, ranks, DTYPES[dtype], demand, weights, left, *beside, config.quantize)


def _choose_dtype(asked: str | None, settings: dict[str, Any], choice: engine_choice.Choice) -> str:
    """Return the name of the type: the model's own if it fixes one, else `asked`, else the checkpoint's."""
    if choice.dtype is not None:
        [found] = [name for name, dtype in DTYPES.items() if dtype == choice.dtype]
        if asked not in (None, found):
            logger.warning("the model itself is %s; --dtype %s does not change it", found, asked)
        return found
    return asked or model_files.stored_dtype(settings)


def _start_guides(directory: Path, tokenizer: Path, vocab_size: int) -> Guides:
    """Start to read the tokenizer on another thread, while the weights are read."""
    return Guides(
        partial(read_tokenizer, tokenizer, vocab_size, model_files.eos_token_ids(directory)), vocab_size
    )


def _join(config: ShardConfig, device: torch.device) -> World:
    if config.world_size == 1:
        return World(0, 1, device=device)
    if config.rendezvous is None:
        raise WorldError("the ranks of a group need a rendezvous to meet at")
    meeting = Meeting(config.rendezvous, config.node_address or LOOPBACK, config.rendezvous_fd)
    joined = collectives.join(config.rank, config.world_size, meeting, MEETING_TIMEOUT_S, device)
    return replace(joined, num_on_host=_num_local(config))


def _num_local(config: ShardConfig) -> int:
    """Return the number of ranks on this machine."""
    return config.local_size or config.world_size


def _local_rank(config: ShardConfig) -> int:
    return config.rank if config.local_rank is None else config.local_rank


def _describe(
    config: ShardConfig, settings: Mapping[str, Any], spec: ModelSpec, dtype: str, allowance: Allowance
) -> pb.InfoResponse:
    """Describe the shard, without the number of blocks. Raises UnsupportedModelError."""
    kinds, directory = pb.InfoResponse.ModelKind, Path(config.model_path)
    return pb.InfoResponse(
        model_kind=kinds.MODEL_KIND_ENCODER_DECODER
        if spec.is_encoder_decoder
        else kinds.MODEL_KIND_DECODER_ONLY,
        model_type=settings["model_type"],
        vocab_size=spec.vocab_size,
        eos_token_ids=model_files.eos_token_ids(directory),
        block_size=config.block_size,
        rank=config.rank,
        world_size=config.world_size,
        epoch=config.epoch,
        weight_dtype=config.quantize or dtype,
        cache_dtype=dtype,
        rope_switch_len=spec.rope_switch_len,
        decoder_start_token_id=_start_token_id(config, settings, spec.vocab_size)
        if spec.is_encoder_decoder
        else 0,
        pad_token_id=model_files.pad_token_id(
            directory, Path(config.tokenizer_path or directory), spec.vocab_size
        ),
        prompt_cache_bytes=allowance.prompt_bytes,
        adapter_cache_bytes=allowance.adapter_bytes,
        preloaded_adapter_ids=read_names(config.lora_adapters),
    )


def _start_token_id(config: ShardConfig, settings: Mapping[str, Any], vocab_size: int) -> int:
    """Return the id of the token with which the decoder begins. Raises UnsupportedModelError."""
    generation = model_files.read_json(Path(config.model_path), "generation_config.json")
    for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for place in (settings, generation):
            if type(place.get(key)) is int:
                if place[key] not in range(vocab_size):
                    raise UnsupportedModelError(f"{key} {place[key]} is no token of the model")
                return int(place[key])
    raise UnsupportedModelError("the configuration does not say with which token the decoder begins")
