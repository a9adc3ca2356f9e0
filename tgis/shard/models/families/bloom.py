"""BLOOM: LayerNorm, also on the embeddings; ALiBi instead of position embeddings."""

from tgis.shard.checkpoint.weights import Source, first_of, grouped
from tgis.shard.models.config_reader import Config, divide_heads, integer, number, refuse_others
from tgis.shard.models.parts.alibi import alibi_slopes
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("bloom",)
PREFIX = "transformer."


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, apply_residual_connection_post_layernorm=False)
    hidden_size = integer(config, "n_embed", config.get("hidden_size"))
    num_heads = integer(config, "n_head", config.get("num_attention_heads"))
    return DecoderSpec(
        num_layers=integer(config, "n_layer", config.get("num_hidden_layers")),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divide_heads(hidden_size, num_heads),
        intermediate_size=4 * hidden_size,
        vocab_size=integer(config, "vocab_size"),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation="gelu_new",
        gated=False,
        slopes=alibi_slopes(num_heads),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "transformer.h.{i}."
    qkv = layer + "self_attention.query_key_value"
    return {
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "blocks.{i}.norm_1": layer + "input_layernorm",
        "blocks.{i}.attention.qkv": grouped(qkv, spec.num_heads, spec.head_dim),
        "blocks.{i}.attention.out": layer + "self_attention.dense",
        "blocks.{i}.norm_2": layer + "post_attention_layernorm",
        "blocks.{i}.mlp.up": layer + "mlp.dense_h_to_4h",
        "blocks.{i}.mlp.down": layer + "mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": first_of("lm_head", "transformer.word_embeddings") if spec.tie_embeddings else "lm_head",
    }
