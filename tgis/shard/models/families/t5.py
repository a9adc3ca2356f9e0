"""T5 and mT5, also Flan-T5, UL2, mT0 and UMT5: unscaled attention scores, relative position bias."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, first_of, stack
from tgis.shard.models.config_reader import Config, activation, integer, number
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import EncoderDecoderSpec, RelativeBias, StackSpec

MODEL_TYPES: tuple[str, ...] = ("t5", "mt5", "umt5")
# Names of the token embedding, which both stacks and often the head share. A checkpoint has one or more.
_TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


def spec(config: Config) -> EncoderDecoderSpec:
    model_type = config["model_type"]
    feed = config.get("feed_forward_proj") or ("relu" if model_type == "t5" else "gated-gelu")
    gating, _, name = str(feed).rpartition("-")
    if gating not in ("", "gated"):
        raise UnsupportedModelError(f"feed_forward_proj {feed!r} is not supported")
    if feed == "gated-gelu":  # the name means the tanh approximation
        name = "gelu_new"
    num_layers, num_heads = integer(config, "num_layers"), integer(config, "num_heads")
    decoder = StackSpec(
        num_layers=integer(config, "num_decoder_layers", num_layers),
        hidden_size=integer(config, "d_model"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=integer(config, "d_kv"),
        intermediate_size=integer(config, "d_ff"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-6),
        activation=activation({"feed_forward_proj": name}, "feed_forward_proj", name),
        gated=gating == "gated",
        attention_scale=1.0,
        relative_bias=_relative_bias(config, model_type),
    )
    return EncoderDecoderSpec(
        encoder=replace(decoder, num_layers=num_layers),
        decoder=decoder,
        vocab_size=integer(config, "vocab_size"),
        logit_scale=decoder.hidden_size**-0.5 if _scales_logits(config, model_type) else 1.0,
    )


def _relative_bias(config: Config, model_type: str) -> RelativeBias:
    num_buckets = integer(config, "relative_attention_num_buckets", 32)
    max_distance = integer(config, "relative_attention_max_distance", 128)
    if num_buckets % 4 or max_distance <= num_buckets // 2:
        text = f"{num_buckets} buckets for distances up to {max_distance} are not supported"
        raise UnsupportedModelError(text)
    return RelativeBias(num_buckets, max_distance, is_per_layer=model_type == "umt5")


def _scales_logits(config: Config, model_type: str) -> bool:
    # T5 1.0 scales logits and ties the head; T5 1.1 does neither. Newer configurations tie every head and
    # have a key for the scaling. mT5 never scales.
    given = config.get("scale_decoder_outputs")
    return model_type != "mt5" and (
        config.get("tie_word_embeddings") is not False if given is None else given
    )


def sources(spec: EncoderDecoderSpec) -> dict[str, Source]:
    tables = {"embed": first_of(*_TABLES, "lm_head"), "head": first_of("lm_head", *_TABLES)}
    return {**tables, **_stack_sources(spec, "encoder", 1), **_stack_sources(spec, "decoder", 2)}


def _stack_sources(spec: EncoderDecoderSpec, name: str, last: int) -> dict[str, Source]:
    # `last` is the index of the feed-forward in a block.
    ours, layer = name + ".blocks.{i}.", name + ".block.{i}.layer."
    attention = layer + "0.SelfAttention."
    cross = layer + "1.EncDecAttention."
    feed = f"{layer}{last}."
    gates = ("wi_0", "wi_1") if spec.decoder.gated else ("wi",)
    cross_sources: dict[str, Source] = {
        ours + "cross_norm": layer + "1.layer_norm",
        ours + "cross.q": cross + "q",
        ours + "cross.kv": stack(cross + "k", cross + "v"),
        ours + "cross.out": cross + "o",
    }
    return {
        ours + "bias": attention + "relative_attention_bias",
        ours + "norm_1": layer + "0.layer_norm",
        ours + "attention.qkv": stack(*(attention + x for x in "qkv")),
        ours + "attention.out": attention + "o",
        **(cross_sources if name == "decoder" else {}),
        ours + "norm_2": feed + "layer_norm",
        ours + "mlp.up": stack(*(feed + "DenseReluDense." + gate for gate in gates)),
        ours + "mlp.down": feed + "DenseReluDense.wo",
        f"{name}.norm": f"{name}.final_layer_norm",
    }
