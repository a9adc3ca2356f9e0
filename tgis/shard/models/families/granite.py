"""Granite 3: Llama with constant factors for embeddings, attention scores, branches and logits."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config, number
from tgis.shard.models.families import llama
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("granite",)
sources = llama.sources


def spec(config: Config) -> DecoderSpec:
    return replace(
        llama.spec(config),
        attention_scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        scales_virtual=True,
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )
