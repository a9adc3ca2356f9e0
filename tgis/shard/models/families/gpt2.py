"""GPT-2: LayerNorm, learned positions, weights stored as [in, out]. SantaCoder's variant has multi-query
attention."""

from tgis.shard.checkpoint.weights import Source, first_of, stack, transposed
from tgis.shard.models.config_reader import (
    Config,
    activation,
    divide_heads,
    integer,
    number,
    refuse_others,
)
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gpt2",)
PREFIX = "transformer."


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden_size = integer(config, "n_embd", config.get("hidden_size"))
    num_heads = integer(config, "n_head", config.get("num_attention_heads"))
    return DecoderSpec(
        num_layers=integer(config, "n_layer", config.get("num_hidden_layers")),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=1 if config.get("attention_head_type") == "multiquery" else num_heads,
        head_dim=divide_heads(hidden_size, num_heads),
        intermediate_size=integer(config, "n_inner", 4 * hidden_size),
        vocab_size=integer(config, "vocab_size"),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        num_positions=integer(config, "n_positions", config.get("max_position_embeddings")),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "transformer.h.{i}."
    parts = ["c_attn"] if spec.num_kv_heads == spec.num_heads else ["q_attn", "kv_attn"]
    return {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks.{i}.norm_1": layer + "ln_1",
        "blocks.{i}.attention.qkv": stack(*(transposed(layer + f"attn.{part}") for part in parts)),
        "blocks.{i}.attention.out": transposed(layer + "attn.c_proj"),
        "blocks.{i}.norm_2": layer + "ln_2",
        "blocks.{i}.mlp.up": transposed(layer + "mlp.c_fc"),
        "blocks.{i}.mlp.down": transposed(layer + "mlp.c_proj"),
        "norm": "transformer.ln_f",
        "head": first_of("lm_head", "transformer.wte") if spec.tie_embeddings else "lm_head",
    }
