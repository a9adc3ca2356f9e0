"""Reads which layers of a model have a sliding window or chunks."""

from collections.abc import Sequence

from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.interface import UnsupportedModelError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def layer_windows(config: Config, is_local: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention; empty if no layer has a window.

    `is_local` applies if the configuration has no `layer_types`. Raises UnsupportedModelError."""
    return _bound_layers(config, is_local, SLIDING, "sliding_window")


def layer_chunks(config: Config, is_chunked: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the length of each layer's chunks, as `layer_windows` does."""
    return _bound_layers(config, is_chunked, CHUNKED, "attention_chunk_size")


def _bound_layers(config: Config, is_bound: Sequence[bool], kind: str, key: str) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [kind if bound else FULL for bound in is_bound]
    known = isinstance(kinds, list) and all(each in (FULL, kind) for each in kinds)
    if not known or len(kinds) != len(is_bound):
        expected = f"{len(is_bound)} of {FULL} or {kind}"
        raise UnsupportedModelError(f"layer types {kinds!r} are not supported, expected {expected}")
    if kind not in kinds:
        return ()
    bound = integer(config, key)
    return tuple(bound if each == kind else None for each in kinds)
