"""Ministral 3: Mistral with YaRN and queries whose scale grows with the position."""

from collections.abc import Mapping
from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config, integer, optional_number, refuse_partial_rope
from tgis.shard.models.families import llama
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec, QueryScaling

MODEL_TYPES: tuple[str, ...] = ("ministral3",)
PREFIX = "language_model."

# Values that a configuration may leave out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    given = config.get("rope_parameters") or config.get("rope_scaling") or ROPE
    config = {**config, "rope_parameters": given}
    refuse_partial_rope(config)
    shared = llama.spec(config)
    has_window = config.get("sliding_window") is not None
    return replace(
        shared,
        windows=layer_windows({**config, "layer_types": None}, [has_window] * shared.num_layers),
        query_scaling=query_scaling(given if isinstance(given, Mapping) else {}),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return llama.sources(spec)


def query_scaling(rope: Config) -> QueryScaling | None:
    beta = optional_number(rope, "llama_4_scaling_beta")
    if beta is None:
        return None
    return QueryScaling(beta, integer(rope, "original_max_position_embeddings"))
