"""Qwen 2 and 2.5, and MiMo: Llama with biases for queries, keys and values; the last layers may have a
window."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.families import llama
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("qwen2", "mimo")
sources = llama.sources


def spec(config: Config) -> DecoderSpec:
    config = {"num_key_value_heads": 32, **config}
    shared = llama.spec(config)
    return replace(shared, windows=windows(config, shared.num_layers), qkv_bias=True, out_bias=False)


def windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Return the layers' windows. `sliding_window` has no effect without `use_sliding_window`."""
    if not config.get("use_sliding_window"):
        return layer_windows({**config, "sliding_window": None}, [False] * num_layers)
    first = 0 if config.get("max_window_layers") == 0 else integer(config, "max_window_layers", 28)
    return layer_windows({"sliding_window": 4096, **config}, [i >= first for i in range(num_layers)])
