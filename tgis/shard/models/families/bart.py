"""BART and mBART: learned positions; post-norm in BART, pre-norm in mBART."""

from tgis.shard.checkpoint.weights import Source, first_of, stack
from tgis.shard.models.config_reader import Config, activation, divide_heads, integer
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import EncoderDecoderSpec, StackSpec

MODEL_TYPES: tuple[str, ...] = ("bart", "mbart")
PREFIX = "model."
_TABLES = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens")
# Unused rows at the beginning of the table of positions.
_OFFSET = 2


def spec(config: Config) -> EncoderDecoderSpec:
    encoder, decoder = _stack_spec(config, "encoder"), _stack_spec(config, "decoder")
    if encoder.num_heads != decoder.num_heads:
        text = f"{encoder.num_heads} attention heads in the encoder and {decoder.num_heads} in the decoder"
        raise UnsupportedModelError(f"{text} are not supported")
    return EncoderDecoderSpec(encoder, decoder, integer(config, "vocab_size"), has_head_bias=True)


def _stack_spec(config: Config, name: str) -> StackSpec:
    size = integer(config, "d_model")
    num_heads = integer(config, f"{name}_attention_heads")
    is_multilingual = config["model_type"] == "mbart"
    return StackSpec(
        num_layers=integer(config, f"{name}_layers"),
        hidden_size=size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divide_heads(size, num_heads),
        intermediate_size=integer(config, f"{name}_ffn_dim"),
        norm_eps=1e-5,
        norm="layer",
        norm_place="before" if is_multilingual else "sum",
        activation=activation(config, "activation_function", "gelu"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        num_positions=integer(config, "max_position_embeddings", 1024) + _OFFSET,
        position_offset=_OFFSET,
        embedding_scale=size**0.5 if config.get("scale_embedding") else 1.0,
        embedding_norm=True,
        final_norm=is_multilingual,
    )


def sources(spec: EncoderDecoderSpec) -> dict[str, Source]:
    return {
        "embed": first_of(*_TABLES, "lm_head"),
        "head": first_of("lm_head", *_TABLES),
        "head_bias": lambda place: place.checkpoint.fetch("final_logits_bias"),
        **_stack_sources("encoder"),
        **_stack_sources("decoder"),
    }


def _stack_sources(name: str) -> dict[str, Source]:
    ours = name + ".blocks.{i}."
    layer = f"model.{name}.layers." + "{i}."
    attention, cross = layer + "self_attn.", layer + "encoder_attn."
    cross_sources: dict[str, Source] = {
        ours + "cross_norm": layer + "encoder_attn_layer_norm",
        ours + "cross.q": cross + "q_proj",
        ours + "cross.kv": stack(cross + "k_proj", cross + "v_proj"),
        ours + "cross.out": cross + "out_proj",
    }
    return {
        f"{name}.positions": f"model.{name}.embed_positions",
        f"{name}.embed_norm": f"model.{name}.layernorm_embedding",
        ours + "attention.qkv": stack(*(attention + f"{x}_proj" for x in "qkv")),
        ours + "attention.out": attention + "out_proj",
        ours + "norm_1": layer + "self_attn_layer_norm",
        **(cross_sources if name == "decoder" else {}),
        ours + "mlp.up": layer + "fc1",
        ours + "mlp.down": layer + "fc2",
        ours + "norm_2": layer + "final_layer_norm",
        f"{name}.norm": f"model.{name}.layer_norm",
    }
