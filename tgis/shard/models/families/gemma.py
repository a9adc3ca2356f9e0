"""Gemma 1: Llama with scaled embeddings, gated GELU and norms whose weights are offsets from one."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import llama
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gemma",)
sources = llama.sources


def spec(config: Config) -> DecoderSpec:
    config = {"num_key_value_heads": 16, **config}
    # The first checkpoints say gelu but were trained with the tanh approximation.
    return make_shared_spec(config, None if config.get("hidden_act") == "gelu" else config.get("hidden_act"))


def make_shared_spec(config: Config, activation: str | None) -> DecoderSpec:
    """Return the specification that all Gemma families share. Raises UnsupportedModelError."""
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("bidirectional attention is not supported")
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    shared = llama.spec({**defaults, **config, "hidden_act": activation or "gelu_pytorch_tanh"})
    return replace(shared, norm="rms_plus_one", embedding_scale=shared.hidden_size**0.5)
