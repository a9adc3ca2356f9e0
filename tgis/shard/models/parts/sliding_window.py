"""Reads which layers of a model have a sliding window."""

from collections.abc import Sequence

from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.interface import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Config, is_local: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention; empty if no layer has a window.

    `is_local` applies if the configuration has no `layer_types`. Raises UnsupportedModelError."""
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if local else FULL for local in is_local]
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != len(is_local):
        expected = f"{len(is_local)} of {FULL} or {SLIDING}"
        raise UnsupportedModelError(f"layer types {kinds!r} are not supported, expected {expected}")
    if SLIDING not in kinds:
        return ()
    window = integer(config, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)
