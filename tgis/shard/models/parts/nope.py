"""Reads which layers of a model have no rotary embedding."""

from tgis.shard.layers.rotary import Rope
from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.interface import UnsupportedModelError


def read_nope_layers(config: Config, num_layers: int) -> frozenset[int]:
    """Return the layers without a rotary embedding: those whose entry of `no_rope_layers` is 0, or every
    `no_rope_layer_interval`-th layer. Raises UnsupportedModelError."""
    rotated = config.get("no_rope_layers")
    if not rotated:
        interval = integer(config, "no_rope_layer_interval", 4)
        return frozenset(range(interval - 1, num_layers, interval))
    is_list = isinstance(rotated, list) and all(each in (0, 1) for each in rotated)
    if not is_list or len(rotated) < num_layers:
        raise UnsupportedModelError(
            f"no_rope_layers {rotated!r} is not a list of {num_layers} zeros and ones"
        )
    return frozenset(layer for layer in range(num_layers) if not rotated[layer])


def leave_out(rope: Rope | None, nope_layers: frozenset[int], num_layers: int) -> tuple[Rope | None, ...]:
    """Return each layer's rotary embedding: `rope`, or None for `nope_layers`."""
    return tuple(None if layer in nope_layers else rope for layer in range(num_layers))
