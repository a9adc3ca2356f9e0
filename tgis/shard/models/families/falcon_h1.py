"""Falcon H1: Llama with Mamba 2 beside attention in every layer, and constant factors in all branches."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, stack
from tgis.shard.models.config_reader import (
    Config,
    integer,
    number,
    numbers,
    refuse_others,
    refuse_partial_rope,
)
from tgis.shard.models.families import granitemoehybrid, llama
from tgis.shard.models.spec import DecoderSpec, MambaSpec, SideBySide

MODEL_TYPES: tuple[str, ...] = ("falcon_h1",)

# Values that a configuration may leave out.
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    refuse_partial_rope(config)
    refuse_others(config, hidden_act="silu")  # also that of the convolution
    shared = llama.spec(config)
    gate, down = numbers(config, "mlp_multipliers", 2)
    return replace(
        shared,
        mamba=_mamba(config, shared),
        side_by_side=SideBySide(
            attention_input=number(config, "attention_in_multiplier", 1.0),
            attention_output=number(config, "attention_out_multiplier", 1.0),
            mamba_input=number(config, "ssm_in_multiplier", 1.0),
            mamba_output=number(config, "ssm_out_multiplier", 1.0),
        ),
        # The factor of keys is one of scores.
        attention_scale=shared.head_dim**-0.5 * number(config, "key_multiplier", 1.0),
        gate_scale=gate,
        feed_forward_scale=down,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=number(config, "lm_head_multiplier", 1.0),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.layers.{i}."
    feed_forward = layer + "feed_forward."
    return {
        **llama.sources(spec),
        **granitemoehybrid.mamba_sources(layer + "mamba"),
        "blocks.{i}.mamba_norm": layer + "input_layernorm",
        "blocks.{i}.norm_2": layer + "pre_ff_layernorm",
        "blocks.{i}.mlp.up": stack(feed_forward + "gate_proj", feed_forward + "up_proj"),
        "blocks.{i}.mlp.down": feed_forward + "down_proj",
        "norm": "model.final_layernorm",
    }


def _mamba(config: Config, shared: DecoderSpec) -> MambaSpec:
    expanded = integer(config, "mamba_expand", 2) * shared.hidden_size
    width = integer(config, "mamba_d_ssm", expanded if "mamba_d_ssm" in config else 1024)
    mamba = granitemoehybrid.read_mamba(config, frozenset(range(shared.num_layers)), width)
    gates_last = config.get("mamba_norm_before_gate") is not False
    gate, x, left, right, step = numbers(config, "ssm_multipliers", 5)
    return replace(
        mamba,
        out_bias=bool(config.get("projectors_bias")),
        gating=("after_norm" if gates_last else "before_norm") if config.get("mamba_rms_norm") else "no_norm",
        part_scales=(gate, x, left, right, step),
    )
