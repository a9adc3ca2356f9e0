"""OPT: ReLU, learned positions from the third row of their table. OPT-350M is post-norm, and its embeddings
are narrower than its layers."""

from tgis.shard.checkpoint.weights import Source, first_of, stack
from tgis.shard.models.config_reader import Config, activation, divide_heads, integer, refuse_others
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("opt",)
PREFIX = "model."

POSITION_OFFSET = 2


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, layer_norm_elementwise_affine=True)
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    norms_first = config.get("do_layer_norm_before", True)
    has_bias = bool(config.get("enable_bias", True))
    return DecoderSpec(
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divide_heads(hidden_size, num_heads),
        intermediate_size=integer(config, "ffn_dim"),
        vocab_size=integer(config, "vocab_size"),
        norm="layer",
        norm_eps=1e-5,
        norm_place="before" if norms_first else "sum",
        activation=activation(config, "activation_function", "relu"),
        gated=False,
        num_positions=integer(config, "max_position_embeddings") + POSITION_OFFSET,
        position_offset=POSITION_OFFSET,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        embedding_size=integer(config, "word_embed_proj_dim", hidden_size),
        final_norm=bool(norms_first and not config.get("_remove_final_layer_norm")),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.decoder.layers.{i}."
    return {
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "embed_in": "model.decoder.project_in",
        "embed_out": "model.decoder.project_out",
        "blocks.{i}.norm_1": layer + "self_attn_layer_norm",
        "blocks.{i}.attention.qkv": stack(*(layer + f"self_attn.{x}_proj" for x in "qkv")),
        "blocks.{i}.attention.out": layer + "self_attn.out_proj",
        "blocks.{i}.norm_2": layer + "final_layer_norm",
        "blocks.{i}.mlp.up": layer + "fc1",
        "blocks.{i}.mlp.down": layer + "fc2",
        "norm": "model.decoder.final_layer_norm",
        "head": first_of("lm_head", "model.decoder.embed_tokens") if spec.tie_embeddings else "lm_head",
    }
