"""Multimodal Mistral Small 3 and 4 and Ministral 3, whose text part is served: Mistral, Mistral 4 or
Ministral 3."""

from collections.abc import Mapping

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import llama, ministral3, mistral, mistral4
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("mistral3",)
PREFIX = "language_model."

# Values that published checkpoints leave out.
DEFAULTS = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "max_position_embeddings": 131072,
    "sliding_window": None,
}


def spec(config: Config) -> DecoderSpec:
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(f"text_config {text!r} of the configuration is not an object")
    # A head that is stored nevertheless is read.
    text = {**text, "tie_word_embeddings": config.get("tie_word_embeddings") is not False}
    kind = text.get("model_type", "mistral")
    if kind == "ministral3":
        return ministral3.spec(text)
    if kind == "mistral4":
        return mistral4.spec(text)
    if kind != "mistral":
        raise UnsupportedModelError(f"text_config of the model type {kind!r} is not supported")
    return mistral.spec({**DEFAULTS, **text} if not text.get("hidden_size") else text)


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return llama.sources(spec) if spec.latent is None else mistral4.sources(spec)
