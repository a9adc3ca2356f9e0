"""Phi 3 and 4: Llama with fused tensors; some models have a sliding window, or other rotary frequencies for
long sequences."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import llama
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("phi3",)


def spec(config: Config) -> DecoderSpec:
    shared = llama.spec({"rms_norm_eps": 1e-5, **config})
    windows = layer_windows(config, [config.get("sliding_window") is not None] * shared.num_layers)
    return replace(shared, windows=windows)


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.layers.{i}."
    return {
        **llama.sources(spec),
        "blocks.{i}.attention.qkv": layer + "self_attn.qkv_proj",
        "blocks.{i}.mlp.up": layer + "mlp.gate_up_proj",
    }
