"""Qwen 3: Qwen 2 with norms of queries and keys per head, and without its biases."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import llama, qwen2
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("qwen3",)


def spec(config: Config) -> DecoderSpec:
    config = {"num_key_value_heads": 32, "head_dim": 128, **config}
    shared = llama.spec(config)
    return replace(shared, windows=qwen2.windows(config, shared.num_layers), qk_norm="head")


def sources(spec: DecoderSpec) -> dict[str, Source]:
    attention = "model.layers.{i}.self_attn."
    return {
        **llama.sources(spec),
        "blocks.{i}.attention.q_norm": attention + "q_norm",
        "blocks.{i}.attention.k_norm": attention + "k_norm",
    }
