"""MPT: no biases, ALiBi."""

from tgis.shard.checkpoint.weights import Source, first_of
from tgis.shard.models.config_reader import (
    Config,
    divide_heads,
    integer,
    number,
    optional_number,
    refuse_others,
    section,
)
from tgis.shard.models.parts.alibi import alibi_slopes
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("mpt",)
PREFIX = "transformer."


def spec(config: Config) -> DecoderSpec:
    attention = section(config, "attn_config")
    _refuse_variants(config, attention)
    hidden_size = integer(config, "d_model", config.get("hidden_size"))
    num_heads = integer(config, "n_heads", config.get("num_attention_heads"))
    return DecoderSpec(
        num_layers=integer(config, "n_layers", config.get("num_hidden_layers")),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer(attention, "kv_n_heads", _num_kv_heads(attention, num_heads)),
        head_dim=divide_heads(hidden_size, num_heads),
        intermediate_size=integer(config, "expansion_ratio", 4) * hidden_size,
        vocab_size=integer(config, "vocab_size"),
        norm="layer_no_bias",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        gated=False,
        slopes=alibi_slopes(num_heads, number(attention, "alibi_bias_max", 8)),
        clip_qkv=number(attention, "clip_qkv") if attention.get("clip_qkv") else None,
        attention_scale=optional_number(attention, "softmax_scale"),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "transformer.blocks.{i}."
    return {
        "embed": "transformer.wte",
        "blocks.{i}.norm_1": layer + "norm_1",
        "blocks.{i}.attention.qkv": layer + "attn.Wqkv",
        "blocks.{i}.attention.out": layer + "attn.out_proj",
        "blocks.{i}.norm_2": layer + "norm_2",
        "blocks.{i}.mlp.up": layer + "ffn.up_proj",
        "blocks.{i}.mlp.down": layer + "ffn.down_proj",
        "norm": "transformer.norm_f",
        "head": first_of("lm_head", "transformer.wte") if spec.tie_embeddings else "lm_head",
    }


def _num_kv_heads(attention: Config, num_heads: int) -> int | None:
    kind = attention.get("attn_type") or "multihead_attention"
    return {"multihead_attention": num_heads, "multiquery_attention": 1}.get(kind)


def _refuse_variants(config: Config, attention: Config) -> None:
    # Options of the original code that no published model uses.
    refuse_others(config, no_bias=True, logit_scale=None, final_logit_softcapping=None, block_overrides=None)
    refuse_others(config, norm_type=("low_precision_layernorm", "layernorm"))
    refuse_others(section(config, "ffn_config"), ffn_type="mptmlp", ffn_act_fn=None, ffn_hidden_size=None)
    refuse_others(
        attention, attn_type=("multihead_attention", "multiquery_attention", "grouped_query_attention")
    )
    refuse_others(attention, alibi=True, rope=False, prefix_lm=False, sliding_window_size=-1)
    refuse_others(attention, qk_ln=False, qk_gn=False, attn_logit_softcapping=None, kv_dim=None)
