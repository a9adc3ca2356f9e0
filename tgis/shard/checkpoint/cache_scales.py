"""Reads the scales of keys and values from a checkpoint: numbers that each layer's are divided by before they
are rounded to 8 bits. Without them, large keys and values may be cut off."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from tgis.shard.checkpoint.opening import OpenCheckpoint, open_checkpoint
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.memory.kv_cache import CacheScale

_ATTENTION = re.compile(r"(?:(?:model|language_model|transformer)\.)*layers\.(\d{1,9})\.self_attn\.(.+)")
# Ends of the names of the scales of keys and of values. The last name is that of one scale for both.
_ENDS_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.output_scale", "k_proj.k_scale", "kv_scale")
_ENDS_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.output_scale", "v_proj.v_scale", "kv_scale")


def read_cache_scales(directory: Path, num_layers: int) -> list[CacheScale | None]:
    """Return the scales of each layer, None where the checkpoint has none. Raises WeightsError."""
    checkpoint = open_checkpoint(directory)
    names: dict[tuple[int, str], str] = {}
    for name in checkpoint.list_names():
        if found := _ATTENTION.fullmatch(name):
            names[int(found[1]), found[2]] = name
    ends = (_ENDS_OF_KEYS, _ENDS_OF_VALUES)
    return [_read(checkpoint, *(_find(names, layer, each) for each in ends)) for layer in range(num_layers)]


def _find(names: dict[tuple[int, str], str], layer: int, ends: Sequence[str]) -> str | None:
    return next((names[layer, end] for end in ends if (layer, end) in names), None)


def _read(checkpoint: OpenCheckpoint, key: str | None, value: str | None) -> CacheScale | None:
    if key is None and value is None:
        return None
    return CacheScale(*(1.0 if name is None else _read_number(checkpoint, name) for name in (key, value)))


def _read_number(checkpoint: OpenCheckpoint, name: str) -> float:
    stored = checkpoint.fetch_any(name)
    numbers = stored.read().double().flatten().tolist()
    if len(numbers) != 1:
        raise WeightsError(
            f"{stored.label} has shape {list(stored.shape)}, expected one number: only scales of whole "
            "layers are served; without --kv-cache-dtype none is needed"
        )
    if not (math.isfinite(numbers[0]) and numbers[0] > 0):
        raise WeightsError(f"{stored.label} is {numbers[0]}, which is no scale")
    return float(numbers[0])
