"""Granite 3 MoE: Granite 3 with experts in every layer. One tensor holds all experts of a layer."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, expert
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import granite, mixtral
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("granitemoe",)


def spec(config: Config) -> DecoderSpec:
    return replace(granite.spec(config), experts=mixtral.experts(config))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    sparse = "model.layers.{i}.block_sparse_moe."
    return {
        **granite.sources(spec),
        "blocks.{i}.mlp.router": sparse + "router.layer",
        "blocks.{i}.mlp.experts.{e}.up": expert(sparse + "input_linear"),
        "blocks.{i}.mlp.experts.{e}.down": expert(sparse + "output_linear"),
    }
