"""OLMo 2: Llama with norms after its branches, and norms of queries and keys over all heads."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import llama
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("olmo2",)


def spec(config: Config) -> DecoderSpec:
    return replace(llama.spec({"rms_norm_eps": 1e-5, **config}), norm_place="after", qk_norm="whole")


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.layers.{i}."
    return {
        **llama.sources(spec),
        "blocks.{i}.attention.q_norm": layer + "self_attn.q_norm",
        "blocks.{i}.attention.k_norm": layer + "self_attn.k_norm",
        "blocks.{i}.post_norm_1": layer + "post_attention_layernorm",
        "blocks.{i}.post_norm_2": layer + "post_feedforward_layernorm",
    }
