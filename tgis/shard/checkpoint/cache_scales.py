"""Reads KV cache scales from a checkpoint: each layer's keys and values are divided by them before they are
rounded to 8 bits. Without scales, large keys and values may be clipped."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from tgis.shard.checkpoint.opening import OpenCheckpoint, open_checkpoint
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.memory.kv_cache import CacheScale

_ATTENTION = re.compile(r"(?:(?:model|language_model|transformer)\.)*layers\.(\d{1,9})\.self_attn\.(.+)")
# Suffixes of the names of key scales and value scales. The last one names a single scale for both.
_KEY_SUFFIXES = ("k_scale", "attn.k_scale", "k_proj.output_scale", "k_proj.k_scale", "kv_scale")
_VALUE_SUFFIXES = ("v_scale", "attn.v_scale", "v_proj.output_scale", "v_proj.v_scale", "kv_scale")


def read_cache_scales(directory: Path, num_layers: int) -> list[CacheScale | None]:
    """Return each layer's scales, or None where the checkpoint has none. Raises WeightsError."""
    checkpoint = open_checkpoint(directory)
    names: dict[tuple[int, str], str] = {}
    for name in checkpoint.list_names():
        if match := _ATTENTION.fullmatch(name):
            names[int(match[1]), match[2]] = name
    return [
        _read(checkpoint, _find(names, layer, _KEY_SUFFIXES), _find(names, layer, _VALUE_SUFFIXES))
        for layer in range(num_layers)
    ]


def _find(names: dict[tuple[int, str], str], layer: int, suffixes: Sequence[str]) -> str | None:
    return next((names[layer, suffix] for suffix in suffixes if (layer, suffix) in names), None)


def _read(checkpoint: OpenCheckpoint, key: str | None, value: str | None) -> CacheScale | None:
    if key is None and value is None:
        return None
    return CacheScale(*(1.0 if name is None else _read_number(checkpoint, name) for name in (key, value)))


def _read_number(checkpoint: OpenCheckpoint, name: str) -> float:
    stored = checkpoint.fetch_any(name)
    numbers = stored.read().double().flatten().tolist()
    if len(numbers) != 1:
        raise WeightsError(
            f"{stored.label} has shape {list(stored.shape)}, expected one number: only per-layer scales are "
            "supported; without --kv-cache-dtype none is needed"
        )
    if not (math.isfinite(numbers[0]) and numbers[0] > 0):
        raise WeightsError(f"{stored.label} is {numbers[0]}, which is not a valid scale")
    return float(numbers[0])
