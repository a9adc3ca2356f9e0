"""Registry of the native model families. Builds and loads their models."""

import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from tgis.shard.checkpoint.tensors import MissingTensorError, WeightsError
from tgis.shard.checkpoint.weights import Source, Weights
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.ops import Kernels, Parts
from tgis.shard.memory.kv_cache import cached_heads
from tgis.shard.models.config_reader import refuse_others
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.encoder_decoder import EncoderDecoderModel
from tgis.shard.models.families import (
    bart,
    bloom,
    deepseek_v2,
    deepseek_v3,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
    granitemoeshared,
    llama,
    llama4,
    mamba2,
    ministral3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    mpt,
    nemotron_h,
    olmo2,
    olmo3,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    starcoder2,
    t5,
)
from tgis.shard.models.interface import ConfigurationError, UnsupportedModelError
from tgis.shard.models.sensitive_weights import describe_sensitivity
from tgis.shard.models.spec import DecoderSpec, DeltaNetSpec, MambaSpec, Spec
from tgis.shard.models.unread_tensors import refuse_unread
from tgis.shard.quant.registry import find_format
from tgis.shard.quant.rounding import UNROUNDED, Rounding

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Keys of the number of layers. Lists of that length are made before any tensor is read.
LAYER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
MAX_LAYERS = 4096  # more than any model has
# More than any model has. The library for grammars allocates memory for each token, before weights are read.
MAX_VOCAB_SIZE = 1 << 20


class Family(Protocol):
    MODEL_TYPES: tuple[str, ...]

    def spec(self, config: Mapping[str, Any]) -> Spec: ...
    def sources(self, spec: Any) -> dict[str, Source]: ...


DECODERS: tuple[Family, ...] = (
    llama,
    llama4,
    mistral,
    ministral3,
    mistral3,
    mistral4,
    qwen2,
    qwen3,
    granite,
    granite_swa,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    phi3,
    olmo2,
    olmo3,
    smollm3,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    granitemoe,
    granitemoeshared,
    glm4_moe,
    deepseek_v2,
    deepseek_v3,
    glm4_moe_lite,
    granitemoe_swa,
    gpt_oss,
    granitemoehybrid,
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    nemotron_h,
    falcon_h1,
    mamba2,
    gpt_neox,
    gpt2,
    gpt_bigcode,
    starcoder2,
    bloom,
    falcon,
    mpt,
    opt,
)
ENCODER_DECODERS: tuple[Family, ...] = (t5, bart)
MODULES = DECODERS + ENCODER_DECODERS
FAMILIES: dict[str, Family] = {model_type: module for module in MODULES for model_type in module.MODEL_TYPES}


def is_known(config: Mapping[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in FAMILIES


def make_spec(config: Mapping[str, Any]) -> Spec:
    """Return the specification of a config.json's model. Raises UnsupportedModelError."""
    model_type = config.get("model_type")
    if not is_known(config):
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"model type {model_type!r} is not supported; supported are: {known}")
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            refuse_others(part, is_causal=True)
            _check_num_layers(part)
    spec = FAMILIES[config["model_type"]].spec(config)
    if spec.vocab_size > MAX_VOCAB_SIZE:
        text = f"vocab_size {spec.vocab_size} of the configuration is larger than {MAX_VOCAB_SIZE}"
        raise ConfigurationError(text)
    if spec.num_kv_heads and spec.num_heads % spec.num_kv_heads:
        text = f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads"
        raise UnsupportedModelError(text)
    return spec


def _check_num_layers(config: Mapping[str, Any]) -> None:
    for key in LAYER_KEYS:
        value = config.get(key)
        if isinstance(value, int) and value > MAX_LAYERS:
            shown = reprlib.repr(value)  # the number may have thousands of digits
            raise ConfigurationError(f"{key} {shown} of the configuration is larger than {MAX_LAYERS}")


def serves(config: Mapping[str, Any]) -> bool:
    try:
        make_spec(config)
    except UnsupportedModelError:
        return False
    return True


def build(spec: Spec, parts: Parts) -> Decoder | EncoderDecoderModel:
    """Build the model. Raises WeightsError."""
    return Decoder(spec, parts) if isinstance(spec, DecoderSpec) else EncoderDecoderModel(spec, parts)


def open_weights(path: Path, config: Mapping[str, Any], spec: Spec, kind: type[Weights] = Weights) -> Weights:
    """Open the checkpoint with its family's names of tensors. Raises WeightsError."""
    family = FAMILIES[config["model_type"]]
    return kind(path, family.sources(spec), getattr(family, "PREFIX", ""), find_format(config, path))


def load(
    path: Path,
    config: Mapping[str, Any],
    group: ProcessGroup,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
    rounding: Rounding = UNROUNDED,
    spec: Spec | None = None,
) -> Decoder | EncoderDecoderModel:
    """Load this rank's part of the model with weights in `dtype`. The defaults are the CPU's kernels and the
    specification that `config` describes. Raises UnsupportedModelError and WeightsError."""
    spec = spec or make_spec(config)
    with open_weights(path, config, spec) as weights:
        parts = make_parts(spec, group, weights, dtype, kernels or _cpu_kernels(), rounding)
        return read_model(path, config, spec, parts)


def make_parts(
    spec: Spec,
    group: ProcessGroup,
    weights: Weights,
    dtype: torch.dtype,
    kernels: Kernels,
    rounding: Rounding = UNROUNDED,
) -> Parts:
    """Return the common arguments of the layers of a model."""
    return Parts(
        group,
        weights,
        dtype,
        kernels,
        scheme=rounding.scheme,
        sensitivity=describe_sensitivity(spec),
        factors=rounding.inputs.factors,
        importance=rounding.inputs.importance,
    )


def read_model(
    path: Path, config: Mapping[str, Any], spec: Spec, parts: Parts
) -> Decoder | EncoderDecoderModel:
    """Build the model, and check that it reads all tensors of its checkpoint. Raises UnsupportedModelError
    and WeightsError."""
    try:
        model = build(spec, parts)
    except MissingTensorError:
        if isinstance(spec, DecoderSpec):
            _require_head(path, parts.weights)
        raise
    refuse_unread(path, parts.weights.list_unread(), config)
    if parts.widened:
        logger.warning(
            "%d matrices are kept as %s on this rank, because %d ranks cut them inside groups of codes that "
            "share a scale: they take %.1f MiB more than as codes",
            len(parts.widened),
            str(parts.dtype).removeprefix("torch."),
            parts.group.size,
            sum(parts.widened) / MIB,
        )
    return model


def _require_head(path: Path, weights: Weights) -> None:
    """Raise WeightsError if a decoder's checkpoint has a table of tokens but no head."""
    if weights.has("embed.weight") and not weights.has("head.weight"):
        raise WeightsError(
            f"{path}: the checkpoint has no head that generates text, like that of a base model: use the "
            "checkpoint of the whole model, or set tie_word_embeddings in config.json if its head is the "
            "table of tokens"
        )


def _cpu_kernels() -> Kernels:
    from tgis.shard.kernels.cpu.ops import CPU_KERNELS  # imports numba, which GPUs do not need

    return CPU_KERNELS


def count_embedding_elements(spec: Spec) -> int:
    if not isinstance(spec, DecoderSpec):
        return spec.vocab_size * spec.encoder.hidden_size
    inputs = spec.layer_inputs
    others = 0 if inputs is None else inputs.num_rows * spec.num_layers * inputs.width
    return spec.vocab_size * spec.embedding_width + others


def check_sharding(spec: Spec, size: int) -> None:
    """Check that `size` ranks can share the model. Raises UnsupportedModelError."""
    numbers = {each.num_kv_heads for each in cached_heads(spec).values()}
    shared = all(number % size == 0 or size % number == 0 for number in numbers)
    fits = all(width % size == 0 for width in spec.intermediate_sizes)
    if size > spec.vocab_size:
        raise UnsupportedModelError(f"a vocabulary of {spec.vocab_size} cannot be split over {size} shards")
    if isinstance(spec, DecoderSpec) and spec.mamba is not None:
        _check_mamba_sharding(spec.mamba, size)
    if isinstance(spec, DecoderSpec) and spec.delta_net is not None:
        _check_delta_net_sharding(spec.delta_net, size)
    if spec.num_heads % size or not shared or not fits:
        kv_heads = " and ".join(str(number) for number in sorted(numbers))
        widths = " and ".join(str(width) for width in dict.fromkeys(spec.intermediate_sizes))
        raise UnsupportedModelError(
            f"the model cannot be split over {size} shards: it has {spec.num_heads} attention heads, "
            f"{kv_heads} key/value heads and an intermediate size of {widths}"
        )


def _check_mamba_sharding(mamba: MambaSpec, size: int) -> None:
    shared = mamba.num_groups % size == 0 or size % mamba.num_groups == 0
    if mamba.num_heads % size or not shared:
        raise UnsupportedModelError(
            f"{mamba.num_heads} Mamba heads in {mamba.num_groups} groups cannot be split over {size} shards"
        )


def _check_delta_net_sharding(delta: DeltaNetSpec, size: int) -> None:
    shared = delta.num_key_heads % size == 0 or size % delta.num_key_heads == 0
    if delta.num_heads % size or not shared:
        raise UnsupportedModelError(
            f"{delta.num_heads} value heads and {delta.num_key_heads} key heads of linear attention cannot "
            f"be split over {size} shards"
        )
