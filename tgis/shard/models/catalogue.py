"""The families we serve by ourselves, and how a model of one is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from tgis.shard.layers import cpu
from tgis.shard.layers.kernels import Kernels, Parts
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.families import llama
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.weights import Source, Weights
from tgis.shard.world import World


class Family(Protocol):
    MODEL_TYPES: tuple[str, ...]

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec: ...
    def sources(self, spec: DecoderSpec) -> dict[str, Source]: ...


_MODULES: tuple[Family, ...] = (llama,)
FAMILIES: dict[str, Family] = {model_type: module for module in _MODULES for model_type in module.MODEL_TYPES}


def describe(config: Mapping[str, Any], size: int = 1) -> DecoderSpec:
    """The shape of the model that a config.json describes, to be cut over `size` ranks; touches no tensor.

    Raises UnsupportedModelError."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"model type {model_type!r} is not supported; supported are: {known}")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints are not supported")
    spec = FAMILIES[model_type].spec(config)
    _check_cut(spec, size)
    return spec


def load(
    path: Path, config: Mapping[str, Any], world: World, dtype: torch.dtype, kernels: Kernels = cpu
) -> Decoder:
    """This rank's part of the model in directory `path`, with weights rounded to `dtype`.

    Raises UnsupportedModelError, WeightsError."""
    spec = describe(config, world.size)
    weights = Weights(path, FAMILIES[config["model_type"]].sources(spec))
    return Decoder(spec, Parts(world, weights, dtype, kernels))


def _check_cut(spec: DecoderSpec, size: int) -> None:
    if spec.num_heads % spec.num_kv_heads:
        text = f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads"
        raise UnsupportedModelError(text)
    shared = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    if spec.num_heads % size or not shared or spec.intermediate_size % size or size > spec.vocab_size:
        raise UnsupportedModelError(
            f"the model cannot be cut over {size} shards: {spec.num_heads} attention heads, "
            f"{spec.num_kv_heads} key/value heads, intermediate size {spec.intermediate_size}"
        )
