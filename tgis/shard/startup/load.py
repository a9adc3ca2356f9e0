"""Builds a model runner: reads the model, compiles kernels, and sizes the KV cache by the memory left."""

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
from tgis.shard.adapters.loading import AdapterLimits, adapter_limits, open_adapters, read_names
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.collectives import LOOPBACK, ProcessGroup, ProcessGroupError, RendezvousPoint
from tgis.shard.kernels.cpu.jit.compiler import compile_progress
from tgis.shard.memory.host_limits import count_cores, release_memory
from tgis.shard.memory.kv_cache import KVCache, bytes_per_block
from tgis.shard.models.interface import Model, ModelSpec, UnsupportedModelError
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.registry import find_scheme, find_scheme_name
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.forward import Forward, GraphForward
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides, read_tokenizer
from tgis.shard.startup import engine_choice, memory_plan, platform, quantize_check
from tgis.shard.startup.engine_choice import Choice
from tgis.shard.startup.memory_plan import GIB, Demand, MemoryBudget
from tgis.shard.startup.platform import Platform, configure_torch
from tgis.shard.startup.warm_up import WarmUp, largest_step

logger = logging.getLogger(__name__)

# Longest time that a rank waits for another one that is still reading its weights.
RENDEZVOUS_TIMEOUT_S = 600.0


def load(config: ShardConfig, group: ProcessGroup | None = None, on: Platform | None = None) -> ModelRunner:
    """Load the model. If `group` is None, the ranks connect here.

    Raises DeviceError, ModelNotFoundError, UnsupportedModelError, WeightsError, ProcessGroupError,
    ModelTooLargeError or CacheTooSmallError."""
    began = time.monotonic()
    plan = _plan(config, on)
    on, demand = plan.on, plan.demand
    configure_torch(config.cpu_threads or max(1, count_cores() // _num_local(config)))
    info, guides = plan.describe_shard(), plan.start_guides()
    group = group or _connect(config, on.device)
    plan.check_fit(group)
    before = on.memory.memory_used()
    model = plan.choice.load(group, plan.dtype, on.kernels)
    _check_length(model.spec, demand.max_sequence_length)
    release_memory()
    weight_gib = (on.memory.memory_used() - before) / GIB
    guides.wait_until_ready()  # keep the tokenizer's memory out of the measurement of a step below
    if plan.limits.adapter_bytes:
        on.kernels.prepare_adapters()
    loaded = _Loaded(plan, info, model, group, guides, open_adapters(config, model))
    budget = loaded.measure_budget()
    compile_progress.finish()
    runner = loaded.make_runner(memory_plan.make_cache(model.spec, group, plan.dtype, demand, budget))
    num_blocks = runner.info.num_blocks
    logger.info(
        "loaded in %.1f s: memory grew by %.2f GiB with %s weights, %.2f GiB are cache; it holds %d blocks, "
        "%d tokens, %.1f requests of %d tokens",
        *(time.monotonic() - began, weight_gib, info.weight_dtype, num_blocks * loaded.block_bytes / GIB),
        *(num_blocks, num_blocks * demand.block_size, num_blocks / demand.blocks_per_request),
        demand.max_sequence_length,
    )
    return runner


def sequence_length(config: ShardConfig, settings: Mapping[str, Any]) -> int:
    return config.max_sequence_length or model_files.max_sequence_length(settings)


def _plan(config: ShardConfig, on: Platform | None) -> "_Plan":
    """Check that the model can be served, before anything slow starts."""
    directory = Path(config.model_path)
    settings = model_files.read_json(directory, "config.json")
    config = replace(config, quantize=find_scheme_name(config.quantize, read_settings(settings, directory)))
    how = (config.deployment_framework, config.world_size, config.trust_remote_code)
    choice = engine_choice.choose(directory, settings, *how, find_scheme(config.quantize))
    quantize_check.check_engine(config.quantize, choice)
    on = on or _choose_platform(config, choice)
    quantize_check.check_platform(config.quantize, on)
    length, is_encoder_decoder = sequence_length(config, settings), choice.spec.is_encoder_decoder
    _check_length(choice.spec, length)
    sizes = (config.max_batch_size, config.kv_cache_tokens)
    demand = Demand(config.block_size, length, *sizes, is_encoder_decoder)
    limits = adapter_limits(config, choice.is_native, length)
    dtype_name = _choose_dtype(config.dtype, settings, choice)
    kept_type = quantize_check.name_kept_type(config, settings, on, dtype_name)
    return _Plan(config, settings, choice, on, demand, limits, dtype_name, kept_type)


@dataclass(frozen=True)
class _Plan:
    """Decisions that need no weights."""

    config: ShardConfig
    settings: dict[str, Any]  # config.json
    choice: Choice
    on: Platform
    demand: Demand
    limits: AdapterLimits
    dtype_name: str  # of the cache, and of weights that are not kept as codes
    kept_type: str  # of the weights of linear layers

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def tokenizer_directory(self) -> Path:
        return Path(self.config.tokenizer_path or self.config.model_path)

    def check_fit(self, group: ProcessGroup) -> None:
        """Check that the model fits. No rank reads weights before all have looked at the memory left."""
        weights = self.choice.weight_bytes
        if weights is None:
            weights = quantize_check.count_bytes(self.config, self.settings, self.choice, self.on, self.dtype)
        if not self.choice.is_native:  # with other engines, every rank holds all weights
            weights *= group.size
        weights = weights * group.local_size // group.size
        memory_plan.check_fit(
            self.choice.spec,
            group,
            self.dtype,
            self.demand,
            weights,
            self.on.memory_left(group),
            self.on.cache_divisor,
            self.limits.num_bytes,
            self.kept_type,
        )

    def start_guides(self) -> Guides:
        """Start to read the tokenizer on another thread, while the weights are read."""
        vocab_size, eos_token_ids = self.choice.spec.vocab_size, model_files.eos_token_ids(self._directory)
        return Guides(
            partial(read_tokenizer, self.tokenizer_directory, vocab_size, eos_token_ids), vocab_size
        )

    def describe_shard(self) -> pb.InfoResponse:
        config, spec, kinds = self.config, self.choice.spec, pb.InfoResponse.ModelKind
        info = pb.InfoResponse(
            model_kind=kinds.MODEL_KIND_DECODER_ONLY,
            model_type=self.settings["model_type"],
            vocab_size=spec.vocab_size,
            eos_token_ids=model_files.eos_token_ids(self._directory),
            block_size=config.block_size,
            rank=config.rank,
            world_size=config.world_size,
            epoch=config.epoch,
            weight_dtype=self.kept_type,
            cache_dtype=self.dtype_name,
            rope_switch_len=spec.rope_switch_len,
            pad_token_id=model_files.pad_token_id(self._directory, self.tokenizer_directory, spec.vocab_size),
            prompt_cache_bytes=self.limits.prompt_bytes,
            adapter_cache_bytes=self.limits.adapter_bytes,
            preloaded_adapter_ids=read_names(config.lora_adapters),
        )
        if spec.is_encoder_decoder:
            info.model_kind = kinds.MODEL_KIND_ENCODER_DECODER
            info.decoder_start_token_id = self._find_start_token_id()
        return info

    @property
    def _directory(self) -> Path:
        return Path(self.config.model_path)

    def _find_start_token_id(self) -> int:
        generation = model_files.read_json(self._directory, "generation_config.json")
        for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            for place in (self.settings, generation):
                if type(place.get(key)) is int:
                    if place[key] not in range(self.choice.spec.vocab_size):
                        raise UnsupportedModelError(f"{key} {place[key]} is not a token id of the model")
                    return int(place[key])
        raise UnsupportedModelError("the configuration has no decoder_start_token_id")


@dataclass(frozen=True)
class _Loaded:
    """Parts of a model runner, without its KV cache."""

    plan: _Plan
    info: pb.InfoResponse
    model: Model
    group: ProcessGroup
    guides: Guides
    adapters: LoadedAdapters

    @property
    def block_bytes(self) -> int:
        return bytes_per_block(self.model.spec, self.group, self.plan.demand.block_size, self.plan.dtype)

    def make_runner(self, cache: KVCache) -> ModelRunner:
        spec, demand, on = self.model.spec, self.plan.demand, self.plan.on
        limits = RowLimits(
            demand.max_sequence_length,
            demand.block_size,
            spec.vocab_size,
            spec.rope_switch_len,
            spec.is_encoder_decoder,
        )
        attention = on.attention(cache)
        table = BatchBuilder(demand.max_batch_size, limits, on.device, self.adapters, attention)
        info = pb.InfoResponse(num_blocks=cache.num_blocks)
        info.MergeFrom(self.info)
        # Steps can be captured if they consist of the platform's kernels alone.
        is_captured = on.captures_steps and self.plan.choice.is_native and self.group.size == 1
        forward = (GraphForward if is_captured else Forward)(self.model, attention)
        return HostModelRunner(forward, table, self.guides, info, self.adapters)

    def measure_budget(self) -> MemoryBudget:
        """Compile the kernels and measure the memory that is left for caches."""
        plan, group, on = self.plan, self.group, self.plan.on
        cache = memory_plan.allocate(self.model.spec, group, plan.dtype, plan.demand.block_size, 1)
        warm_up = WarmUp(self.make_runner(cache), group, plan.demand, on.memory)
        warm_up.compile()
        on.memory.release_memory()
        left = on.memory_left(group)

        def budget_beside(step: int) -> MemoryBudget:
            return MemoryBudget(left, step, group.local_size, on.cache_divisor, plan.limits.num_bytes)

        def is_enough(step: int) -> bool:
            return budget_beside(step).share >= plan.demand.wanted_blocks * self.block_bytes

        largest = largest_step(plan.demand, plan.config.max_step_tokens)
        budget = budget_beside(warm_up.measure(largest, is_enough, left))
        memory_plan.check_budget(budget)
        on.memory.release_memory()
        return budget


def _choose_platform(config: ShardConfig, choice: Choice) -> Platform:
    local_rank = config.rank if config.local_rank is None else config.local_rank
    on = platform.choose(config.device, local_rank, _num_local(config))
    if on is platform.ON_CPU or choice.is_native:
        return on
    logger.warning("%s computes on the CPU only, so the GPUs are not used", choice.engine)
    return platform.ON_CPU


def _check_length(spec: ModelSpec, length: int) -> None:
    if spec.max_positions and length > spec.max_positions:
        text = f"the model has {spec.max_positions} positions; --max-sequence-length {length} is more"
        raise UnsupportedModelError(text)


def _choose_dtype(asked: str | None, settings: dict[str, Any], choice: Choice) -> str:
    if choice.dtype is not None:
        [found] = [name for name, dtype in DTYPES.items() if dtype == choice.dtype]
        if asked not in (None, found):
            logger.warning("--dtype %s has no effect: the model fixes its type, %s", asked, found)
        return found
    return asked or model_files.stored_dtype(settings)


def _connect(config: ShardConfig, device: torch.device) -> ProcessGroup:
    if config.world_size == 1:
        return ProcessGroup(0, 1, device=device)
    if config.rendezvous is None:
        raise ProcessGroupError("the ranks of a group need the address of a rendezvous")
    point = RendezvousPoint(config.rendezvous, config.node_address or LOOPBACK, config.rendezvous_fd)
    group = collectives.connect(config.rank, config.world_size, point, RENDEZVOUS_TIMEOUT_S, device)
    return replace(group, num_on_host=_num_local(config))


def _num_local(config: ShardConfig) -> int:
    return config.local_size or config.world_size
