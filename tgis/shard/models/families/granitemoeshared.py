"""Granite 3 MoE with a shared expert: Granite 3 MoE and an expert that all tokens use."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.families import granite, granitemoe, mixtral
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("granitemoeshared",)


def spec(config: Config) -> DecoderSpec:
    shared_size = integer(config, "shared_intermediate_size") if config.get("shared_intermediate_size") else 0
    experts = replace(mixtral.experts(config), shared_size=shared_size)
    return replace(granite.spec(config), experts=experts)


def sources(spec: DecoderSpec) -> dict[str, Source]:
    shared = "model.layers.{i}.shared_mlp."
    return {
        **granitemoe.sources(spec),
        "blocks.{i}.mlp.shared.up": shared + "input_linear",
        "blocks.{i}.mlp.shared.down": shared + "output_linear",
    }
