"""Mixtral: Mistral with experts in every layer."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, stack
from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.families import llama, mistral
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, Experts

MODEL_TYPES: tuple[str, ...] = ("mixtral",)

DEFAULTS = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    return replace(mistral.spec(config), experts=experts(config))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    sparse = "model.layers.{i}.block_sparse_moe."
    return {
        **llama.sources(spec),
        "blocks.{i}.mlp.router": sparse + "gate",
        "blocks.{i}.mlp.experts.{e}.up": stack(sparse + "experts.{e}.w1", sparse + "experts.{e}.w3"),
        "blocks.{i}.mlp.experts.{e}.down": sparse + "experts.{e}.w2",
    }


def experts(config: Config, size_key: str = "intermediate_size") -> Experts:
    """Return the experts of a layer. Raises UnsupportedModelError."""
    num_experts, num_active = integer(config, "num_local_experts"), integer(config, "num_experts_per_tok")
    if num_active > num_experts:
        raise UnsupportedModelError(f"tokens cannot use {num_active} of {num_experts} experts")
    return Experts(num_experts, num_active, integer(config, size_key))
