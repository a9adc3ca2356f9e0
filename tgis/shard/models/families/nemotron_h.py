"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers of one branch each, which is Mamba 2, attention without
positions, an MLP with squared ReLU, or experts. Experts may read and write latents."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, first_of, stack
from tgis.shard.models.config_reader import (
    Config,
    activation,
    integer,
    number,
    optional_integer,
    refuse_others,
)
from tgis.shard.models.families import glm4_moe, granitemoehybrid
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, Experts, MambaSpec

MODEL_TYPES: tuple[str, ...] = ("nemotron_h",)

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
KINDS = {
    **{kind: kind for kind in (MAMBA, ATTENTION, MLP, EXPERTS)},
    "M": MAMBA,
    "*": ATTENTION,
    "-": MLP,
    "E": EXPERTS,
    "mamba": MAMBA,
    "attention": ATTENTION,
}
# Values that a configuration may leave out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    refuse_others(config, attention_bias=False, mamba_hidden_act="silu")
    if config.get("sliding_window"):
        raise UnsupportedModelError("sliding_window of the configuration is not supported")
    kinds = _list_kinds(config)
    return DecoderSpec(
        num_layers=len(kinds),
        hidden_size=integer(config, "hidden_size"),
        num_heads=integer(config, "num_attention_heads"),
        num_kv_heads=integer(config, "num_key_value_heads"),
        head_dim=integer(config, "head_dim", config.get("attention_head_dim") or 128),
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        mlp_bias=bool(config.get("mlp_bias")),
        branches=tuple("mixer" if kind in (MAMBA, ATTENTION) else "feed_forward" for kind in kinds),
        mamba=_mamba(config, kinds),
        experts=_experts(config, kinds) if EXPERTS in kinds else None,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "backbone.layers.{i}."
    mixer = layer + "mixer."
    return {
        "embed": "backbone.embeddings",
        "blocks.{i}.norm_1": layer + "norm",
        "blocks.{i}.norm_2": layer + "norm",
        "blocks.{i}.attention.qkv": stack(*(mixer + f"{x}_proj" for x in "qkv")),
        "blocks.{i}.attention.out": mixer + "o_proj",
        **granitemoehybrid.mamba_sources(layer + "mixer"),
        "blocks.{i}.mlp.up": mixer + "up_proj",
        "blocks.{i}.mlp.down": mixer + "down_proj",
        "blocks.{i}.mlp.router": mixer + "gate",
        "blocks.{i}.mlp.choice": mixer + "gate.e_score_correction_bias",
        "blocks.{i}.mlp.experts.{e}.up": mixer + "experts.{e}.up_proj",
        "blocks.{i}.mlp.experts.{e}.down": mixer + "experts.{e}.down_proj",
        "blocks.{i}.mlp.shared.up": mixer + "shared_experts.up_proj",
        "blocks.{i}.mlp.shared.down": mixer + "shared_experts.down_proj",
        "blocks.{i}.mlp.narrow": mixer + "fc1_latent_proj",
        "blocks.{i}.mlp.widen": mixer + "fc2_latent_proj",
        "norm": "backbone.norm_f",
        "head": first_of("lm_head", "backbone.embeddings") if spec.tie_embeddings else "lm_head",
    }


def _list_kinds(config: Config) -> list[str]:
    """Return the kind of each layer, from a list or from a pattern with a letter for each layer."""
    given = (
        config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    )
    names = list(given) if isinstance(given, str | list | tuple) else []
    if not names or any(not isinstance(name, str) or name not in KINDS for name in names):
        raise UnsupportedModelError(f"layers_block_type {given!r} of the configuration is not supported")
    return [KINDS[name] for name in names]


def _mamba(config: Config, kinds: list[str]) -> MambaSpec | None:
    layers = frozenset(i for i, kind in enumerate(kinds) if kind == MAMBA)
    if not layers:
        return None
    num_heads, head_dim = integer(config, "mamba_num_heads", 128), integer(config, "mamba_head_dim", 64)
    renamed = {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": integer(config, "n_groups", 8),
        "mamba_d_state": integer(config, "ssm_state_size", 128),
        "mamba_d_conv": integer(config, "conv_kernel", 4),
        "mamba_conv_bias": config.get("use_conv_bias"),
        "mamba_proj_bias": config.get("use_bias"),
        # transformers raises the steps of prompts to `time_step_min`, but not those of generated tokens.
        "time_step_limit": config.get("time_step_limit"),
    }
    return granitemoehybrid.read_mamba(renamed, layers, num_heads * head_dim)


def _experts(config: Config, kinds: list[str]) -> Experts:
    experts = glm4_moe.experts({**config, "n_shared_experts": 1}, len(kinds))
    return replace(
        experts,
        dense_layers=frozenset(i for i, kind in enumerate(kinds) if kind != EXPERTS),
        shared_size=integer(config, "moe_shared_expert_intermediate_size", 7688),
        latent_size=optional_integer(config, "moe_latent_size"),
    )
