"""Gemma 3, also the text part of multimodal checkpoints: Gemma 2 with norms of queries and keys per head
instead of soft caps on scores; layers with a sliding window have their own rotary embedding."""

from collections.abc import Mapping
from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config, integer, rope
from tgis.shard.models.families import gemma2
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.parts.sliding_window import SLIDING, layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gemma3", "gemma3_text")
PREFIX = "language_model."

# Values that published checkpoints leave out.
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "final_logit_softcapping": None,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **read_text_config(config)}
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError("attn_logit_softcapping is not supported for this model type")
    shared = gemma2.spec({**config, "attn_logit_softcapping": None, "layer_types": None})
    period = integer(config, "sliding_window_pattern", 6)
    is_local = [(i + 1) % period != 0 for i in range(shared.num_layers)]
    return replace(
        shared,
        windows=layer_windows({"sliding_window": 4096, **config}, is_local),
        qk_norm="head",
        local_rope=rope(config, shared.head_dim, SLIDING),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    attention = "model.layers.{i}.self_attn."
    return {
        **gemma2.sources(spec),
        "blocks.{i}.attention.q_norm": attention + "q_norm",
        "blocks.{i}.attention.k_norm": attention + "k_norm",
    }


def read_text_config(config: Config) -> Config:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(f"text_config {text!r} of the configuration is not an object")
    is_tied = all(part.get("tie_word_embeddings", True) for part in (config, text))
    return {**text, "tie_word_embeddings": is_tied}
