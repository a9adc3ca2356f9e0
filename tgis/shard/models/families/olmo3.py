"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary embedding is never scaled."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config, refuse_partial_rope, rope
from tgis.shard.models.families import olmo2
from tgis.shard.models.parts.sliding_window import SLIDING, layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("olmo3",)
sources = olmo2.sources

# Values that a configuration may leave out.
DEFAULTS = {"rope_theta": 5e5, "sliding_window": 4096}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    refuse_partial_rope(config)
    shared = olmo2.spec(config)
    is_local = [(layer + 1) % 4 != 0 for layer in range(shared.num_layers)]
    return replace(
        shared,
        windows=layer_windows(config, is_local),
        local_rope=rope(config, shared.head_dim, SLIDING),
    )
