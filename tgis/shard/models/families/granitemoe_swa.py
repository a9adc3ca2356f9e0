"""Granite 4.5 MoE: Granite 4.5 with experts in every layer. One tensor holds all experts of a layer."""

from tgis.shard.checkpoint.weights import Source, expert
from tgis.shard.models.config_reader import Config, refuse_others
from tgis.shard.models.families import granite_swa, granitemoe
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("granitemoe_swa",)


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, shared_intermediate_size=0)
    return granite_swa.add_sinks(granitemoe.spec(config), config)


def sources(spec: DecoderSpec) -> dict[str, Source]:
    sparse = "model.layers.{i}.block_sparse_moe."
    return {
        **granite_swa.sources(spec),
        "blocks.{i}.mlp.router": sparse + "router",
        "blocks.{i}.mlp.experts.{e}.up": expert(sparse + "experts.gate_up_proj"),
        "blocks.{i}.mlp.experts.{e}.down": expert(sparse + "experts.down_proj"),
    }
