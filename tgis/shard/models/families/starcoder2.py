"""StarCoder 2: Llama's structure with LayerNorm, biases in all linear layers and no gate."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config, activation, number
from tgis.shard.models.families import llama
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("starcoder2",)


def spec(config: Config) -> DecoderSpec:
    shared = llama.spec({"num_key_value_heads": 2, **config, "hidden_act": "silu"})
    has_bias = bool(config.get("use_bias", True))
    has_window = config.get("sliding_window") is not None
    return replace(
        shared,
        norm="layer",
        norm_eps=number(config, "norm_epsilon", 1e-5),
        activation=activation(config, "hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        windows=layer_windows(config, [has_window] * shared.num_layers),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    mlp = "model.layers.{i}.mlp."
    return {
        **llama.sources(spec),
        "blocks.{i}.mlp.up": mlp + "c_fc",
        "blocks.{i}.mlp.down": mlp + "c_proj",
    }
