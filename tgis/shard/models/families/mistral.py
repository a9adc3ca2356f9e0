"""Mistral and Ministral: Llama with a sliding window in all layers or in some."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import llama
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("mistral", "ministral")
sources = llama.sources


def spec(config: Config) -> DecoderSpec:
    config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    shared = llama.spec(config)
    windows = layer_windows(config, [config["sliding_window"] is not None] * shared.num_layers)
    return replace(shared, windows=windows)
