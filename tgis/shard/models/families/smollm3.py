"""SmolLM 3: Llama without a rotary embedding in every fourth layer, which may have a window."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config, refuse_partial_rope
from tgis.shard.models.families import llama
from tgis.shard.models.parts.nope import leave_out, read_nope_layers
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("smollm3",)
sources = llama.sources

# Values that a configuration may leave out.
DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    refuse_partial_rope(config)
    shared = llama.spec(config)
    nope_layers = read_nope_layers(config, shared.num_layers)
    has_window = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    is_local = [has_window and layer in nope_layers for layer in range(shared.num_layers)]
    layer_ropes = leave_out(shared.rope, nope_layers, shared.num_layers)
    return replace(shared, layer_ropes=layer_ropes, windows=layer_windows(config, is_local))
