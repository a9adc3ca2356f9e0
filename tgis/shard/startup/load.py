"""Builds a model runner: reads the model, compiles kernels, and sizes the KV cache by the remaining
memory."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tgis.config.cuda_graphs import parse_graph_sizes
from tgis.config.processes import ShardConfig
from tgis.hub import model_files
from tgis.pb import shard_pb2 as pb
from tgis.process.control_groups import count_cores
from tgis.shard import collectives
from tgis.shard.adapters.loading import AdapterLimits, adapter_limits, open_adapters, read_names
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.collectives import LOOPBACK, ProcessGroup, ProcessGroupError, RendezvousPoint
from tgis.shard.kernels.cpu.jit.cache import use_cache_home
from tgis.shard.memory.host_limits import release_memory
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.memory.state_cache import StateCache
from tgis.shard.models.interface import Model, ModelSpec, UnsupportedModelError
from tgis.shard.models.parts.states import find_state_shape
from tgis.shard.models.rope_option import read_rope_option
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.registry import find_scheme, find_scheme_name
from tgis.shard.quant.rounding import NO_INPUTS
from tgis.shard.quant.schemes import int8
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import DraftParts, ModelRunner, RunnerParts
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides, read_tokenizer
from tgis.shard.speculators.draft_head import DraftHead
from tgis.shard.speculators.draft_model import DraftModel
from tgis.shard.speculators.interface import Served, Speculator, SpeculatorError
from tgis.shard.speculators.registry import (
    AnySpeculator,
    DraftCache,
    DraftShape,
    check_served,
    count_bytes,
    describe,
    find_cache,
    find_shape,
    load_speculator,
)
from tgis.shard.startup import engine_choice
from tgis.shard.startup.engine_choice import TRANSFORMERS, Choice
from tgis.shard.startup.memory import memory_plan
from tgis.shard.startup.memory.cache_size import CacheSizing
from tgis.shard.startup.memory.cache_type import CacheType, choose_cache_type, find_float8
from tgis.shard.startup.memory.memory_plan import GIB, KIB, MIB, Demand, MemoryBudget
from tgis.shard.startup.platforms import choose_platform
from tgis.shard.startup.platforms.interface import Platform, configure_torch
from tgis.shard.startup.quantize import check as quantize_check
from tgis.shard.startup.quantize import probe as quantize_probe
from tgis.shard.startup.quantize.probe import Probe
from tgis.shard.startup.ranks.cpu_placement import place_threads

logger = logging.getLogger(__name__)

# Maximum time that a rank waits for another rank that is still reading its weights.
RENDEZVOUS_TIMEOUT_S = 600.0
# Maximum time in which several ranks find out whether graphs may contain their collectives.
CAPTURE_PROBE_S = 120.0
# Sequences that may have drafts in a step of a model with states. Each of their tokens needs a spare state.
MAX_DRAFTING_ROWS = 8
ALONE = ProcessGroup(0, 1)  # every rank has the whole speculator
TimeLimit = Callable[[float], AbstractContextManager[None]]
"""Function of a number of seconds. Returns a context; the process ends if it is open for longer."""


def no_limit(_: float) -> AbstractContextManager[None]:
    return nullcontext()


def load(config: ShardConfig, group: ProcessGroup | None = None, on: Platform | None = None) -> ModelRunner:
    """Load the model. If `group` is None, the ranks connect here.

    Raises DeviceError, ModelNotFoundError, UnsupportedModelError, WeightsError, ProcessGroupError,
    ModelTooLargeError or CacheTooSmallError."""
    return prepare(config, on).load(group)


def load_where_possible(
    config: ShardConfig, limit_time: TimeLimit = no_limit
) -> tuple["LoadPlan", ModelRunner]:
    """Load the model like `load`, and also return the plan. If transformers' code of the model does not run
    on the GPU, which is known only after a few steps, load it on the CPU."""
    plan = prepare(config)
    try:
        return plan, plan.load(limit_time=limit_time)
    except UnsupportedModelError as error:
        if plan.on.device.type == "cpu" or plan.choice.engine != TRANSFORMERS:
            raise
        obstacle = str(error)
    plan.on.memory.release_memory()
    choose_platform.leave_gpus(config.device, obstacle)
    plan = prepare(replace(config, device="cpu"))
    return plan, plan.load(limit_time=limit_time)


def sequence_length(config: ShardConfig, settings: Mapping[str, Any]) -> int:
    return config.max_sequence_length or model_files.max_sequence_length(settings)


def prepare(config: ShardConfig, on: Platform | None = None) -> "LoadPlan":
    """Check that the model can be served, before any slow work.

    Raises DeviceError, ModelNotFoundError, UnsupportedModelError or WeightsError."""
    directory = Path(config.model_path)
    settings = model_files.read_json(directory, "config.json")
    config = replace(config, quantize=find_scheme_name(config.quantize, read_settings(settings, directory)))
    choice = engine_choice.choose(
        directory,
        settings,
        config.deployment_framework,
        config.world_size,
        config.trust_remote_code,
        find_scheme(config.quantize),
        read_rope_option(config),
    )
    quantize_check.check_engine(config, choice)
    if config.speculator is not None:
        check_served(config.speculator, choice.spec)
    device = _find_device(config, choice) if on is None else on.device
    dtype_name = _choose_dtype(config.dtype, settings, choice, device)
    layout = quantize_check.find_layout(config, settings)
    has_codes = layout is not None
    config = replace(config, cpu_arithmetic=_choose_arithmetic(config, choice, device, dtype_name, has_codes))
    draft = _find_draft_shape(config, settings, choice, layout)
    on = on or _make_platform(config, choice, device, layout, draft)
    if config.kv_cache_memory_fraction is not None:
        on = replace(on, cache_fraction=config.kv_cache_memory_fraction)
    quantize_check.check_platform(config.quantize, on)
    length = sequence_length(config, settings)
    _check_length(choice.spec, length)
    demand = Demand(
        block_size=config.block_size,
        max_sequence_length=length,
        max_batch_size=config.max_batch_size,
        kv_cache_tokens=config.kv_cache_tokens,
        is_encoder_decoder=choice.spec.is_encoder_decoder,
        state_bytes=_count_state_bytes(config, choice, on),
    )
    if config.speculator is not None and on.device.type != "cpu":
        _check_speculator(config.speculator, choice.spec, keeps_state=demand.state_bytes > 0)
    limits = adapter_limits(config, choice.is_native, length)
    weight_type = quantize_check.name_weight_type(config, settings, on, dtype_name)
    cache_type = choose_cache_type(config, settings, choice, on, dtype_name)
    return LoadPlan(config, settings, choice, on, demand, limits, dtype_name, weight_type, cache_type)


@dataclass(frozen=True)
class LoadPlan:
    """Decisions that need no weights."""

    config: ShardConfig
    settings: dict[str, Any]  # config.json
    choice: Choice
    on: Platform
    demand: Demand
    limits: AdapterLimits
    dtype_name: str  # type of weights that are not stored as codes
    weight_type: str  # type of the weights of linear layers
    cache_type: CacheType

    def load(self, group: ProcessGroup | None = None, limit_time: TimeLimit = no_limit) -> ModelRunner:
        """Load the model as planned; see the function `load`. `limit_time` limits waits for other ranks that
        have no other limit."""
        began = time.monotonic()
        config = self.config
        on = self.on
        demand = self.demand
        configure_torch(_place_threads(config, on))
        info = self.describe_shard()
        guides = self.start_guides()
        group = group or _connect(config, on)
        self.check_fit(group)
        probe = self._open_probe(group)
        before = on.memory.memory_used()
        inputs = probe.inputs if probe is not None else NO_INPUTS
        model = self.choice.load(group, self.dtype, on.kernels, inputs)
        _check_length(model.spec, demand.max_sequence_length)
        speculator = self._load_speculator(model)
        guides.wait_until_ready()  # so that the measurement of a step below excludes the tokenizer's memory
        release_memory()
        used_gib = (on.memory.memory_used() - before) / GIB
        if self.limits.adapter_bytes:
            on.kernels.prepare_adapters()
        adapters = open_adapters(config, model)
        on.choose_products(group.min)
        loaded = _Loaded(self, info, model, group, guides, adapters, speculator, limit_time)
        runner = loaded.sizing().make_sized_runner()
        loaded.log_parts(runner)
        if probe is not None:
            quantize_probe.warn_of_loss(probe, runner, config, demand.max_sequence_length)
        on.compiler.finish()
        num_blocks = runner.info.num_blocks
        logger.info(
            "loaded in %.1f s: %s take %.2f GiB (%s), the KV cache takes %.2f GiB (%s): %d blocks, "
            "%d tokens, %.1f requests of %d tokens",
            time.monotonic() - began,
            # The tokenizer is read at the same time, into the memory of the host.
            "weights and tokenizer" if on.device.type == "cpu" else "weights",
            used_gib,
            info.weight_dtype,
            num_blocks * loaded.block_bytes / GIB,
            info.cache_dtype,
            num_blocks,
            num_blocks * demand.block_size,
            num_blocks / demand.blocks_per_request,
            demand.max_sequence_length,
        )
        return runner

    def _load_speculator(self, model: Model) -> AnySpeculator | None:
        path = self.config.speculator
        if path is None:
            return None
        length = self.demand.max_sequence_length
        served = Served(self._directory, self.settings, self.tokenizer_directory, length)
        release_memory()
        before = self.on.memory.memory_used()
        speculator = load_speculator(path, model, served, self.dtype, self._choose_speculator_scheme())
        release_memory()
        logger.info(
            "loaded the speculator %s (%s): it drafts at most %d tokens, its weights take %.1f MiB",
            path,
            describe(speculator),
            speculator.num_tokens,
            (self.on.memory.memory_used() - before) / MIB,
        )
        return speculator

    def _choose_speculator_scheme(self) -> Scheme:
        """Return how the weights of a speculator's heads are stored. Drafts change no output, so those of a
        quantized model are rounded to 8 bits."""
        is_quantized = quantize_check.find_layout(self.config, self.settings) is not None
        has_products = self.on.kernels.find_code_packer(int8.LAYOUT) is not None
        return find_scheme("int8") if is_quantized and has_products else UNQUANTIZED

    def _open_probe(self, group: ProcessGroup) -> Probe | None:
        what = (self.config, self.settings, self.choice.spec, group, self.dtype, self.on.kernels)
        return quantize_probe.open_probe(*what)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def tokenizer_directory(self) -> Path:
        return Path(self.config.tokenizer_path or self.config.model_path)

    def check_fit(self, group: ProcessGroup) -> None:
        """Check that the model fits. No rank reads weights before all ranks have measured the free memory."""
        weights = self.choice.weight_bytes
        if weights is None:
            weights = quantize_check.count_bytes(self.config, self.settings, self.choice, self.on, self.dtype)
        if not self.choice.is_native:  # in other engines, every rank holds all weights
            weights *= group.size
        weights = weights * group.local_size // group.size
        on = self.on
        draft_bytes = 0
        if (speculator := self.config.speculator) is not None:
            itemsize = (on.product_dtype or self.dtype).itemsize
            scheme = self._choose_speculator_scheme()
            weights += group.local_size * count_bytes(speculator, itemsize, scheme)
            if (cache := find_cache(speculator, self.choice.spec)) is not None:
                draft_bytes = cache.count_bytes(self.demand.block_size, self.cache_type.dtype)
        budget = MemoryBudget(
            left=on.memory_left(group),
            step=0,
            num_ranks=group.local_size,
            cache_fraction=on.cache_fraction,
            adapter_bytes=self.limits.num_bytes,
            margin=on.memory.margin(),
        )
        memory_plan.check_fit(
            self.choice.spec,
            group,
            self.cache_type.dtype,
            self.demand,
            weights,
            budget,
            self.weight_type,
            draft_bytes,
        )

    def start_guides(self) -> Guides:
        """Start to read the tokenizer on another thread, in parallel with the weights."""
        vocab_size = self.choice.spec.vocab_size
        eos_token_ids = model_files.eos_token_ids(self._directory)
        return Guides(
            partial(read_tokenizer, self.tokenizer_directory, vocab_size, eos_token_ids), vocab_size
        )

    def describe_shard(self) -> pb.InfoResponse:
        config = self.config
        spec = self.choice.spec
        kinds = pb.InfoResponse.ModelKind
        info = pb.InfoResponse(
            model_kind=kinds.MODEL_KIND_DECODER_ONLY,
            model_type=self.settings["model_type"],
            vocab_size=spec.vocab_size,
            eos_token_ids=model_files.eos_token_ids(self._directory),
            block_size=config.block_size,
            rank=config.rank,
            world_size=config.world_size,
            epoch=config.epoch,
            weight_dtype=self.weight_type,
            cache_dtype=self.cache_type.name,
            rope_switch_len=spec.rope_switch_len,
            pad_token_id=model_files.pad_token_id(self._directory, self.tokenizer_directory, spec.vocab_size),
            prompt_cache_bytes=self.limits.prompt_bytes,
            adapter_cache_bytes=self.limits.adapter_bytes,
            preloaded_adapter_ids=read_names(config.lora_adapters),
            replaced_kernels=self.on.replaced_kernels,
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
            for settings in (self.settings, generation):
                if type(settings.get(key)) is int:
                    if settings[key] not in range(self.choice.spec.vocab_size):
                        raise UnsupportedModelError(f"{key} {settings[key]} is not a token id of the model")
                    return int(settings[key])
        raise UnsupportedModelError("the configuration has no decoder_start_token_id")


@dataclass(frozen=True)
class _Loaded:
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
        if self.can_capture:
            config = self.plan.config
            configured = parse_graph_sizes(config.cuda_graphs)
            # In an encoder-decoder model, the decoder's prompt is a single token.
            prompt_tokens = 0 if self.model.spec.is_encoder_decoder else config.max_step_tokens
            sizes = self.plan.demand.max_batch_size, prompt_tokens, self.has_adapters
            return self.plan.on.graph_sizes(configured, *sizes)
        return ()

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

    def log_parts(self, runner: ModelRunner) -> None:
        """Log the memory of states, and what a speculator takes of the cache."""
        if runner.info.num_states:
            num_states, spares = runner.info.num_states, self.demand.num_spare_states
            logger.info(
                "states of sequences take %.2f GiB (float32): %d of %.2f MiB%s",
                (num_states + spares) * self.demand.state_bytes / GIB,
                num_states,
                self.demand.state_bytes / MIB,
                f", and {spares} for drafts" if spares else "",
            )
        if self.draft_bytes:
            logger.info(
                "the speculator's keys, values and states take %.2f GiB of the KV cache: %.1f of the %.1f "
                "KiB of each block",
                runner.info.num_blocks * self.draft_bytes / GIB,
                self.draft_bytes / KIB,
                self.block_bytes / KIB,
            )

    def sizing(self) -> CacheSizing:
        plan = self.plan
        return CacheSizing(
            on=plan.on,
            group=self.group,
            demand=self.demand,
            max_step_tokens=plan.config.max_step_tokens,
            block_bytes=self.block_bytes,
            adapter_bytes=plan.limits.num_bytes,
            make_runner=self.make_runner,
            graph_sizes=self.graph_sizes,
        )

    def make_runner(self, num_blocks: int, num_states: int) -> ModelRunner:
        spec = self.model.spec
        demand = self.demand
        on = self.plan.on
        cache_type = self.plan.cache_type
        cache = memory_plan.allocate(
            spec,
            self.group,
            cache_type.dtype,
            demand.block_size,
            num_blocks + on.num_dummy_blocks,
            cache_type.scales,
        )
        info = pb.InfoResponse(num_blocks=num_blocks, num_states=num_states)
        info.MergeFrom(self.info)
        info.max_drafts = 0 if self.speculator is None else self.speculator.num_tokens
        info.max_drafting_rows = self.max_drafting_rows
        shape = find_state_shape(spec, self.group.size, on.state_chunk)
        num_slots = num_states + on.num_dummy_blocks
        limits = RowLimits(
            demand.max_sequence_length,
            demand.block_size,
            spec.vocab_size,
            spec.rope_switch_len,
            spec.is_encoder_decoder,
        )
        parts = RunnerParts(
            model=self.model,
            cache=cache,
            states=None
            if shape is None
            else StateCache(shape, num_slots, self.group.device, demand.num_spare_states),
            guides=self.guides,
            adapters=self.adapters,
            info=info,
            limits=limits,
            max_rows=demand.max_batch_size,
            can_capture=self.can_capture,
            group=self.group,
            has_drafts=(bool(self.plan.config.speculate) or self.speculator is not None) and shape is None,
            speculator=self._open_speculator(num_blocks),
            has_adapters=self.has_adapters,
        )
        return on.make_runner(on, parts)

    def _open_speculator(self, num_blocks: int) -> Speculator | DraftParts | None:
        speculator = self.speculator
        if not isinstance(speculator, DraftModel | DraftHead):
            return speculator
        spec = speculator.spec if isinstance(speculator, DraftHead) else speculator.model.spec
        dtype = self.plan.cache_type.dtype
        on = self.plan.on
        alone = replace(ALONE, device=on.device)
        num_blocks += on.num_dummy_blocks
        cache = memory_plan.allocate(spec, alone, dtype, self.plan.demand.block_size, num_blocks)
        return DraftParts(speculator, cache, self.plan.config.max_step_tokens)


def _check_speculator(path: str, spec: ModelSpec, keeps_state: bool) -> None:
    """Raise SpeculatorError if only CPUs can run a speculator for a model of this specification."""
    cache = find_cache(path, spec)
    obstacle = None if cache is None else engine_choice.find_gpu_obstacle(cache.spec)
    if keeps_state:
        obstacle = "the model keeps a state, which drafts cannot roll back there"
    if obstacle is not None:
        raise SpeculatorError(f"--speculator {path}: GPUs cannot use it: {obstacle}: set --device cpu")


def _count_state_bytes(config: ShardConfig, choice: Choice, on: Platform) -> int:
    """Return the bytes of a sequence's state on one rank; 0 if the model keeps none."""
    shape = find_state_shape(choice.spec, config.world_size, on.state_chunk)
    return 0 if shape is None else shape.num_bytes


def _find_device(config: ShardConfig, choice: Choice) -> torch.device:
    return choose_platform.find_device(
        config.device, _local_rank(config), _num_local(config), choice.gpu_obstacle
    )


def _choose_arithmetic(
    config: ShardConfig, choice: Choice, device: torch.device, dtype_name: str, has_codes: bool
) -> str:
    """Return float32 or bfloat16, where `auto` depends on the processor and on the type of the weights:
    float32 weights keep float32, unless most of them are codes."""
    if config.cpu_arithmetic != "auto":
        return config.cpu_arithmetic
    may_differ = device.type == "cpu" and choice.is_native and (dtype_name != "float32" or has_codes)
    if not may_differ or not choose_platform.has_fast_bfloat16(config.cpu_amx == "auto"):
        return "float32"
    if config.rank == 0:
        logger.info(
            "--cpu-arithmetic auto selects bfloat16, which this processor multiplies about twice as fast as "
            "float32, and which changes the perplexity of real models by less than 0.1 %; "
            "--cpu-arithmetic float32 rounds nothing"
        )
    return "bfloat16"


def _find_draft_shape(
    config: ShardConfig, settings: Mapping[str, Any], choice: Choice, layout: CodeLayout | None
) -> DraftShape | None:
    """Return the shape of the model's speculator, if it has one. `layout` is that of the model's codes."""
    if config.speculator is None:
        return None
    assert isinstance(choice.spec, DecoderSpec), "others have no speculators"
    served = Path(config.model_path), settings, choice.spec
    return find_shape(config.speculator, *served, None if layout is None else int8.LAYOUT)


def _make_platform(
    config: ShardConfig,
    choice: Choice,
    device: torch.device,
    layout: CodeLayout | None,
    draft: DraftShape | None,
) -> Platform:
    """Return the platform for weights with this layout of codes, or None if they have no codes, and for a
    speculator."""
    if device.type == "cpu" and config.rank == 0:
        for name in ("cuda_graphs", "cuda_memory_fraction"):
            if getattr(config, name) is not None:
                logger.warning("--%s has no effect: the model runs on a CPU", name.replace("_", "-"))
    if device.type != "cpu" and config.rank == 0 and config.cpu_arithmetic != "float32":
        logger.warning("--cpu-arithmetic has no effect: the model runs on a GPU")
    use_cache_home(config.cache_home)
    kernel_cache = None if config.kernel_cache is None else Path(config.kernel_cache)
    dtype = None if config.dtype is None else DTYPES[config.dtype]
    rounds = config.activations is not None and device.type == "cpu" and layout is not None
    if config.activations is not None and not rounds and config.rank == 0:
        reason = "the weights are not quantized" if device.type == "cpu" else "the model runs on a GPU"
        logger.warning("--activations %s has no effect: %s", config.activations, reason)
    multiplies_int8 = rounds or layout == int8.LAYOUT
    has_codes = layout is not None and layout != int8.LAYOUT
    has_table = layout is not None and bool(layout.table)
    multiplies_codes = has_codes and (not rounds or has_table)
    # Other products cannot use AMX.
    may_use_amx = config.cpu_amx == "auto" and (multiplies_int8 or config.cpu_arithmetic != "float32")
    return choose_platform.make_platform(
        device,
        kernel_cache,
        config.cuda_memory_fraction,
        dtype,
        config.cpu_arithmetic,
        rounds,
        may_use_amx,
        choice.spec,
        config.world_size,
        multiplies_int8,
        multiplies_codes,
        has_codes and rounds,
        layout,
        find_float8(config.kv_cache_dtype),
        draft,
    )


def _check_length(spec: ModelSpec, length: int) -> None:
    if spec.max_positions and length > spec.max_positions:
        text = f"--max-sequence-length {length} exceeds the model's {spec.max_positions} positions"
        raise UnsupportedModelError(text)


def _choose_dtype(option: str | None, settings: dict[str, Any], choice: Choice, device: torch.device) -> str:
    if choice.dtype is not None:
        [fixed] = [name for name, dtype in DTYPES.items() if dtype == choice.dtype]
        if option not in (None, fixed):
            logger.warning("--dtype %s has no effect: the model's type is fixed to %s", option, fixed)
        return fixed
    stored = model_files.stored_dtype(settings)
    if option is None and stored == "float32" and device.type == "cuda":
        logger.info("the float32 weights are rounded to bfloat16, because --dtype is unset")
        return "bfloat16"
    return option or stored


def _place_threads(config: ShardConfig, on: Platform) -> int:
    """Pin this rank's threads, if that helps. Return the number of compute threads."""
    num_local = _num_local(config)
    may_pin = on.device.type == "cpu" and config.cpu_pinning == "auto"
    num_threads = place_threads(_local_rank(config), num_local) if may_pin else count_cores() // num_local
    return config.cpu_threads or max(1, num_threads)


def _connect(config: ShardConfig, on: Platform) -> ProcessGroup:
    if config.world_size == 1:
        return ProcessGroup(0, 1, device=on.device)
    if config.rendezvous is None:
        raise ProcessGroupError("several ranks need a rendezvous address")
    point = RendezvousPoint(config.rendezvous, config.node_address or LOOPBACK, config.rendezvous_fd)
    ranks = (config.rank, config.world_size)
    group = collectives.connect(*ranks, point, RENDEZVOUS_TIMEOUT_S, on.device, on.open_local)
    if on.open_local is not None and config.rank == 0:
        where = "through gloo, because they share no memory" if group.local is None else "in shared memory"
        logger.info("the ranks exchange activations %s", where)
    return replace(group, num_on_host=_num_local(config))


def _local_rank(config: ShardConfig) -> int:
    return config.rank if config.local_rank is None else config.local_rank


def _num_local(config: ShardConfig) -> int:
    return config.local_size or config.world_size
