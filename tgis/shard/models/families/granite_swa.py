"""Granite 4.5: Granite with attention sinks, a sliding window in most layers, and a rotary embedding per
layer or none."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.layers.rotary import Rope
from tgis.shard.models.config_reader import MAX_FLOAT, Config, is_number, refuse_partial_rope
from tgis.shard.models.families import granite
from tgis.shard.models.interface import ConfigurationError
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("granite_swa",)

PERIOD = 4  # of layers with full attention
DEFAULTS = {
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
}


def spec(config: Config) -> DecoderSpec:
    return add_sinks(granite.spec({**DEFAULTS, **config}), config)


def add_sinks(shared: DecoderSpec, config: Config) -> DecoderSpec:
    """Return the specification of a Granite with sinks, windows and a rotary embedding per layer. Raises
    UnsupportedModelError."""
    refuse_partial_rope(config)
    is_local = [layer % PERIOD != 0 for layer in range(shared.num_layers)]
    windows = layer_windows({"sliding_window": DEFAULTS["sliding_window"], **config}, is_local)
    return replace(shared, sinks=True, windows=windows, layer_ropes=_layer_ropes(shared, config))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return {**granite.sources(spec), "blocks.{i}.attention": "model.layers.{i}.self_attn"}


def _layer_ropes(shared: DecoderSpec, config: Config) -> tuple[Rope | None, ...]:
    """Return each layer's rotary embedding: that of all layers with its own base, or none if that is 0."""
    rope = shared.rope
    thetas = config.get("layer_rope_theta")
    assert rope is not None, "Granite has a rotary embedding"
    if thetas is None:
        return ()
    are_bases = isinstance(thetas, list) and all(_is_base(theta) for theta in thetas)
    if not are_bases or len(thetas) != shared.num_layers:
        expected = f"{shared.num_layers} numbers, 0 or above 1"
        raise ConfigurationError(f"layer_rope_theta {thetas!r} of the configuration is not {expected}")
    ropes = tuple(replace(rope, theta=float(theta)) if theta else None for theta in thetas)
    return () if {*ropes} == {rope} else ropes


def _is_base(theta: object) -> bool:
    return is_number(theta) and (theta == 0 or 1 < theta <= MAX_FLOAT)
