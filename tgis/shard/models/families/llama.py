"""Llama 2 and 3: pre-norm, rotary embedding, gated SiLU, grouped-query attention."""

from tgis.shard.checkpoint.weights import Source, first_of, stack
from tgis.shard.models.config_reader import Config, activation, integer, number, rope
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("llama",)


def spec(config: Config) -> DecoderSpec:
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return DecoderSpec(
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        rope=rope(config, head_dim),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return {
        "embed": "model.embed_tokens",
        **layer_sources("model.layers.{i}."),
        "norm": "model.norm",
        "head": first_of("lm_head", "model.embed_tokens") if spec.tie_embeddings else "lm_head",
    }


def layer_sources(layer: str) -> dict[str, Source]:
    """Return the sources of layers. `layer` begins the names of their modules."""
    return {
        "blocks.{i}.norm_1": layer + "input_layernorm",
        "blocks.{i}.attention.qkv": stack(*(layer + f"self_attn.{x}_proj" for x in "qkv")),
        "blocks.{i}.attention.out": layer + "self_attn.o_proj",
        "blocks.{i}.norm_2": layer + "post_attention_layernorm",
        "blocks.{i}.mlp.up": stack(layer + "mlp.gate_proj", layer + "mlp.up_proj"),
        "blocks.{i}.mlp.down": layer + "mlp.down_proj",
    }
