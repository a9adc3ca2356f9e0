"""Decides how a model is served, before any slow work: engine, device, types, memory and limits."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tgis.config.processes import ShardConfig
from tgis.hub import model_files
from tgis.shard.adapters.loading import adapter_limits
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.models.interface import ModelSpec, UnsupportedModelError
from tgis.shard.models.parts.states import find_state_shape
from tgis.shard.models.rope_option import read_rope_option
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.registry import find_scheme, find_scheme_name
from tgis.shard.speculators.registry import check_served
from tgis.shard.startup import engine_choice, planned_speculator
from tgis.shard.startup.configured_platform import choose_arithmetic, choose_device, open_platform
from tgis.shard.startup.engine_choice import Choice
from tgis.shard.startup.load_plan import LoadPlan
from tgis.shard.startup.memory.cache_type import choose_cache_type
from tgis.shard.startup.memory.memory_plan import Demand
from tgis.shard.startup.platforms.interface import Platform
from tgis.shard.startup.quantize import check as quantize_check

logger = logging.getLogger(__name__)


def prepare(config: ShardConfig, on: Platform | None = None) -> LoadPlan:
    """Check that the model can be served, before any slow work.

    Raises DeviceError, ModelNotFoundError, UnsupportedModelError or WeightsError."""
    directory = Path(config.model_path)
    settings = model_files.read_json(directory, "config.json")
    config = replace(config, quantize=find_scheme_name(config.quantize, read_settings(settings, directory)))
    choice = _choose_engine(config, settings)
    device = choose_device(config, choice) if on is None else on.device
    dtype_name = _choose_dtype(config.dtype, settings, choice, device)
    layout = quantize_check.find_layout(config, settings)
    arithmetic = choose_arithmetic(config, choice, device, dtype_name, layout)
    config = replace(config, cpu_arithmetic=arithmetic)
    draft = planned_speculator.find_draft_shape(config, settings, choice.spec, layout)
    on = on or open_platform(config, choice.spec, device, layout, draft)
    if config.kv_cache_memory_fraction is not None:
        on = replace(on, cache_fraction=config.kv_cache_memory_fraction)
    quantize_check.check_platform(config.quantize, on)
    demand = _plan_demand(config, settings, choice, on)
    if config.speculator is not None and on.device.type != "cpu":
        planned_speculator.check_gpu(config.speculator, choice.spec, keeps_state=demand.state_bytes > 0)
    return LoadPlan(
        config=config,
        settings=settings,
        choice=choice,
        on=on,
        demand=demand,
        limits=adapter_limits(config, choice.is_native, demand.max_sequence_length),
        dtype_name=dtype_name,
        weight_type=quantize_check.name_weight_type(config, settings, on, dtype_name),
        cache_type=choose_cache_type(config, settings, choice, on, dtype_name),
    )


def _choose_engine(config: ShardConfig, settings: Mapping[str, Any]) -> Choice:
    choice = engine_choice.choose(
        Path(config.model_path),
        settings,
        config.deployment_framework,
        size=config.world_size,
        trust_remote_code=config.trust_remote_code,
        scheme=find_scheme(config.quantize),
        rope=read_rope_option(config),
    )
    quantize_check.check_engine(config, choice)
    if config.speculator is not None:
        check_served(config.speculator, choice.spec)
    return choice


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


def _plan_demand(config: ShardConfig, settings: Mapping[str, Any], choice: Choice, on: Platform) -> Demand:
    """Return the cache space that requests could use. Raises UnsupportedModelError."""
    length = config.max_sequence_length or model_files.max_sequence_length(settings)
    check_length(choice.spec, length)
    return Demand(
        block_size=config.block_size,
        max_sequence_length=length,
        max_batch_size=config.max_batch_size,
        kv_cache_tokens=config.kv_cache_tokens,
        is_encoder_decoder=choice.spec.is_encoder_decoder,
        state_bytes=_count_state_bytes(config, choice, on),
    )


def check_length(spec: ModelSpec, length: int) -> None:
    """Raise UnsupportedModelError if the model has no positions for sequences of this length."""
    if spec.max_positions and length > spec.max_positions:
        text = f"--max-sequence-length {length} exceeds the model's {spec.max_positions} positions"
        raise UnsupportedModelError(text)


def _count_state_bytes(config: ShardConfig, choice: Choice, on: Platform) -> int:
    """Return the bytes of a sequence's state on one rank; 0 if the model keeps none."""
    shape = find_state_shape(choice.spec, config.world_size, on.state_chunk)
    return 0 if shape is None else shape.num_bytes
