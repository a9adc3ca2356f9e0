"""GPT-NeoX, Pythia, Dolly: LayerNorm, partial rotary embedding, attention parallel to the feed-forward."""

from tgis.shard.checkpoint.weights import Source, first_of, grouped
from tgis.shard.models.config_reader import Config, activation, divide_heads, integer, number, rope
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gpt_neox",)


def spec(config: Config) -> DecoderSpec:
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim = divide_heads(hidden_size, num_heads)
    attention_bias = bool(config.get("attention_bias", True))
    return DecoderSpec(
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        norm="layer",
        norm_eps=number(config, "layer_norm_eps", 1e-5),
        residual="parallel" if config.get("use_parallel_residual", True) else "sequential",
        activation=activation(config, "hidden_act", "gelu"),
        gated=False,
        rope=rope({**config, **_rotary(config)}, head_dim),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=True,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "gpt_neox.layers.{i}."
    qkv = layer + "attention.query_key_value"
    return {
        "embed": "gpt_neox.embed_in",
        "blocks.{i}.norm_1": layer + "input_layernorm",
        "blocks.{i}.attention.qkv": grouped(qkv, spec.num_heads, spec.head_dim),
        "blocks.{i}.attention.out": layer + "attention.dense",
        "blocks.{i}.norm_2": layer + "post_attention_layernorm",
        "blocks.{i}.mlp.up": layer + "mlp.dense_h_to_4h",
        "blocks.{i}.mlp.down": layer + "mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": first_of("embed_out", "gpt_neox.embed_in") if spec.tie_embeddings else "embed_out",
    }


def _rotary(config: Config) -> Config:
    share = config.get("rotary_pct") or config.get("partial_rotary_factor") or 0.25
    theta = config.get("rotary_emb_base") or config.get("rope_theta")
    return {"partial_rotary_factor": share, "rope_theta": theta}
