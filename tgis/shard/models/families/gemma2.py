"""Gemma 2: Gemma with norms before and after branches, soft caps, and a window in every other layer."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config, number, optional_number
from tgis.shard.models.families import gemma
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gemma2",)

DEFAULTS = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    shared = gemma.make_shared_spec(config, config.get("hidden_activation"))
    return replace(
        shared,
        norm_place="both",
        windows=layer_windows(config, [i % 2 == 0 for i in range(shared.num_layers)]),
        attention_scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=optional_number(config, "attn_logit_softcapping"),
        logit_soft_cap=optional_number(config, "final_logit_softcapping"),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.layers.{i}."
    return {
        **gemma.sources(spec),
        "blocks.{i}.post_norm_1": layer + "post_attention_layernorm",
        "blocks.{i}.norm_2": layer + "pre_feedforward_layernorm",
        "blocks.{i}.post_norm_2": layer + "post_feedforward_layernorm",
    }
