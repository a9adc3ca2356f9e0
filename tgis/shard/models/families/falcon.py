"""Falcon: attention parallel to the feed-forward with one shared norm (7B, 11B) or a norm each (40B, 180B),
or sequential with ALiBi (RW). `RefinedWeb` and `RefinedWebModel` are early names of 40B and of the others."""

import torch

from tgis.shard.checkpoint.weights import Source, grouped
from tgis.shard.models.config_reader import (
    Config,
    activation,
    divide_heads,
    integer,
    number,
    refuse_others,
    rope,
)
from tgis.shard.models.families import bloom
from tgis.shard.models.parts.alibi import alibi_slopes
from tgis.shard.models.spec import DecoderSpec, Residual

MODEL_TYPES: tuple[str, ...] = ("falcon", "RefinedWeb", "RefinedWebModel")
PREFIX = bloom.PREFIX


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, apply_residual_connection_post_layernorm=False)
    hidden_size = integer(config, "hidden_size", config.get("n_embed"))
    num_heads = integer(config, "num_attention_heads", config.get("n_head"))
    head_dim = divide_heads(hidden_size, num_heads)
    has_bias = bool(config.get("bias"))
    return DecoderSpec(
        num_layers=integer(config, "num_hidden_layers", config.get("n_layer")),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        intermediate_size=integer(config, "ffn_hidden_size", 4 * hidden_size),
        vocab_size=integer(config, "vocab_size"),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        residual=_residual(config),
        activation=activation(config, "activation", "gelu"),
        gated=False,
        rope=None if config.get("alibi") else rope(config, head_dim),
        slopes=_slopes(num_heads, head_dim) if config.get("alibi") else (),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "transformer.h.{i}."
    norms = (
        ("ln_attn", "ln_mlp")
        if spec.residual == "parallel"
        else ("input_layernorm", "post_attention_layernorm")
    )
    qkv = layer + "self_attention.query_key_value"
    return {
        **bloom.sources(spec),
        "blocks.{i}.norm_1": layer + norms[0],
        "blocks.{i}.attention.qkv": grouped(qkv, spec.num_kv_heads, spec.head_dim),
        "blocks.{i}.norm_2": layer + norms[1],
    }


def _is_new(config: Config) -> bool:
    return bool(config.get("new_decoder_architecture", config["model_type"] == "RefinedWeb"))


def _num_kv_heads(config: Config, num_heads: int) -> int:
    if _is_new(config):
        return integer(config, "num_kv_heads", config.get("n_head_kv") or num_heads)
    return 1 if _is_set(config, "multi_query") else num_heads


def _residual(config: Config) -> Residual:
    if _is_new(config):
        return "parallel_shared_norm" if config.get("num_ln_in_parallel_attn") == 1 else "parallel"
    return "parallel_shared_norm" if _is_set(config, "parallel_attn") else "sequential"


def _is_set(config: Config, key: str) -> bool:
    # The default is true, but false under the early names.
    return bool(config.get(key, config["model_type"] == "falcon"))


def _slopes(num_heads: int, head_dim: int) -> tuple[float, ...]:
    """Return ALiBi slopes, rounded to bfloat16 as in training and multiplied by the scale of the scores."""
    rounded = torch.tensor(alibi_slopes(num_heads)).bfloat16().double() * head_dim**-0.5
    return tuple(rounded.tolist())
