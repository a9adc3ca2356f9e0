"""Builds a model runner: reads the model, compiles kernels, and sizes the KV cache by the remaining
memory."""

import logging
import time
from dataclasses import replace
from functools import partial

from tgis.config.processes import ShardConfig
from tgis.hub import model_files
from tgis.hub.gguf_files import wait_for_tokenizer
from tgis.process.control_groups import count_cores
from tgis.shard.adapters.loading import open_adapters
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.host_limits import release_memory
from tgis.shard.models.interface import Model, UnsupportedModelError
from tgis.shard.quant.rounding import NO_INPUTS
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.sampling.grammar import Guides, read_tokenizer
from tgis.shard.speculators.interface import Served
from tgis.shard.speculators.registry import AnySpeculator, describe, load_speculator
from tgis.shard.startup.engine_choice import TRANSFORMERS
from tgis.shard.startup.load_plan import LoadPlan
from tgis.shard.startup.loaded_parts import LoadedParts, TimeLimit, no_limit
from tgis.shard.startup.memory.memory_plan import GIB, MIB
from tgis.shard.startup.platforms import choose_platform
from tgis.shard.startup.platforms.interface import Platform, configure_torch
from tgis.shard.startup.prepare import check_length, prepare
from tgis.shard.startup.quantize import probe as quantize_probe
from tgis.shard.startup.quantize.probe import Probe
from tgis.shard.startup.ranks.cpu_placement import place_threads
from tgis.shard.startup.ranks.group import connect, count_local, find_local_rank
from tgis.shard.startup.shard_info import describe_shard

logger = logging.getLogger(__name__)


def load(config: ShardConfig, group: ProcessGroup | None = None, on: Platform | None = None) -> ModelRunner:
    """Load the model. If `group` is None, the ranks connect here.

    Raises DeviceError, ModelNotFoundError, UnsupportedModelError, WeightsError, ProcessGroupError,
    ModelTooLargeError or CacheTooSmallError."""
    return load_planned(prepare(config, on), group)


def load_where_possible(
    config: ShardConfig, limit_time: TimeLimit = no_limit
) -> tuple[LoadPlan, ModelRunner]:
    """Load the model like `load`, and also return the plan. If transformers' code of the model does not run
    on the GPU, which is known only after a few steps, load it on the CPU."""
    plan = prepare(config)
    try:
        return plan, load_planned(plan, limit_time=limit_time)
    except UnsupportedModelError as error:
        if plan.on.device.type == "cpu" or plan.choice.engine != TRANSFORMERS:
            raise
        obstacle = str(error)
    plan.on.memory.release_memory()
    choose_platform.leave_gpus(config.device, obstacle)
    plan = prepare(replace(config, device="cpu"))
    return plan, load_planned(plan, limit_time=limit_time)


def load_planned(
    plan: LoadPlan, group: ProcessGroup | None = None, limit_time: TimeLimit = no_limit
) -> ModelRunner:
    """Load the model as planned; see `load`. `limit_time` limits waits for other ranks that have no other
    limit."""
    began = time.monotonic()
    config, on = plan.config, plan.on
    configure_torch(_place_threads(config, on))
    info = describe_shard(plan)
    guides = _start_guides(plan)
    group = group or connect(config, on.device, on.open_local)
    wait_for_tokenizer(plan.tokenizer_directory)  # the process that writes it takes memory
    plan.check_fit(group)
    probe = _open_probe(plan, group)
    before = on.memory.memory_used()
    model = _load_model(plan, group, probe)
    speculator = _load_speculator(plan, model)
    guides.wait_until_ready()  # so that the measurement of a step below excludes the tokenizer's memory
    release_memory()
    used_bytes = on.memory.memory_used() - before
    adapters = _open_adapters(plan, model)
    on.choose_products(group.min)
    loaded = LoadedParts(
        plan=plan,
        info=info,
        model=model,
        group=group,
        guides=guides,
        adapters=adapters,
        speculator=speculator,
        limit_time=limit_time,
    )
    runner = loaded.make_sized_runner()
    if probe is not None:
        quantize_probe.warn_of_loss(probe, runner, config, plan.demand.max_sequence_length)
    on.compiler.finish()
    _log_loaded(loaded, runner, time.monotonic() - began, used_bytes)
    return runner


def _place_threads(config: ShardConfig, on: Platform) -> int:
    """Pin this rank's threads, if that helps. Return the number of compute threads."""
    num_local = count_local(config)
    may_pin = on.device.type == "cpu" and config.cpu_pinning == "auto"
    num_threads = place_threads(find_local_rank(config), num_local) if may_pin else count_cores() // num_local
    return config.cpu_threads or max(1, num_threads)


def _start_guides(plan: LoadPlan) -> Guides:
    """Start to read the tokenizer on another thread, in parallel with the weights."""
    vocab_size = plan.choice.spec.vocab_size
    eos_token_ids = model_files.eos_token_ids(plan.directory)
    return Guides(partial(read_tokenizer, plan.tokenizer_directory, vocab_size, eos_token_ids), vocab_size)


def _open_probe(plan: LoadPlan, group: ProcessGroup) -> Probe | None:
    return quantize_probe.open_probe(
        plan.config, plan.settings, plan.choice.spec, group, plan.dtype, plan.on.kernels
    )


def _load_model(plan: LoadPlan, group: ProcessGroup, probe: Probe | None) -> Model:
    inputs = NO_INPUTS if probe is None else probe.inputs
    model = plan.choice.load(group, plan.dtype, plan.on.kernels, inputs)
    check_length(model.spec, plan.demand.max_sequence_length)
    return model


def _load_speculator(plan: LoadPlan, model: Model) -> AnySpeculator | None:
    path = plan.config.speculator
    if path is None:
        return None
    length = plan.demand.max_sequence_length
    served = Served(plan.directory, plan.settings, plan.tokenizer_directory, length)
    release_memory()
    before = plan.on.memory.memory_used()
    speculator = load_speculator(path, model, served, plan.dtype, plan.speculator_scheme)
    release_memory()
    logger.info(
        "loaded the speculator %s (%s): it drafts at most %d tokens, its weights take %.1f MiB",
        path,
        describe(speculator),
        speculator.num_tokens,
        (plan.on.memory.memory_used() - before) / MIB,
    )
    return speculator


def _open_adapters(plan: LoadPlan, model: Model) -> LoadedAdapters:
    if plan.limits.adapter_bytes:
        plan.on.kernels.prepare_adapters()
    return open_adapters(plan.config, model)


def _log_loaded(loaded: LoadedParts, runner: ModelRunner, seconds: float, used_bytes: int) -> None:
    """Log how long loading took, and the memory of weights and cache."""
    plan, info = loaded.plan, runner.info
    logger.info(
        "loaded in %.1f s: %s take %.2f GiB (%s), the KV cache takes %.2f GiB (%s): %d blocks, "
        "%d tokens, %.1f requests of %d tokens",
        seconds,
        # The tokenizer is read at the same time, into the memory of the host.
        "weights and tokenizer" if plan.on.device.type == "cpu" else "weights",
        used_bytes / GIB,
        info.weight_dtype,
        info.num_blocks * loaded.block_bytes / GIB,
        info.cache_dtype,
        info.num_blocks,
        info.num_blocks * plan.demand.block_size,
        info.num_blocks / plan.demand.blocks_per_request,
        plan.demand.max_sequence_length,
    )
