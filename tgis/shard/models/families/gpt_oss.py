"""gpt-oss: Llama with attention sinks, a sliding window in every other layer, and experts with clamped gates.
One tensor holds all experts of a layer."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, expert, interleaved, transposed
from tgis.shard.layers.activation import CLAMPED_SWIGLU
from tgis.shard.models.config_reader import Config, refuse_others, refuse_partial_rope
from tgis.shard.models.families import llama, mixtral
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gpt_oss",)

DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0)
    config = {**DEFAULTS, **config}
    refuse_partial_rope(config)
    shared = llama.spec(config)
    return replace(
        shared,
        windows=layer_windows(config, [layer % 2 == 0 for layer in range(shared.num_layers)]),
        sinks=True,
        activation=CLAMPED_SWIGLU,
        experts=replace(mixtral.experts(config), bias=True, router_bias=True),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    mlp = "model.layers.{i}.mlp."
    return {
        **llama.sources(spec),
        "blocks.{i}.attention": "model.layers.{i}.self_attn",
        "blocks.{i}.mlp.router": mlp + "router",
        "blocks.{i}.mlp.experts.{e}.up": interleaved(transposed(expert(mlp + "experts.gate_up_proj"))),
        "blocks.{i}.mlp.experts.{e}.down": transposed(expert(mlp + "experts.down_proj")),
    }
