"""Reads values out of a checkpoint's config.json, so that what is missing or odd is said in one line.

Rotary embeddings are described in two forms: `rope_parameters` (transformers 5) and `rope_scaling` beside
`rope_theta` (before)."""

from collections.abc import Mapping
from math import log
from typing import Any

from tgis.shard.layers.activation import NAMES
from tgis.shard.layers.rotary import LinearScaling, Llama3Scaling, Rope, YarnScaling
from tgis.shard.models.interface import UnsupportedModelError

Config = Mapping[str, Any]

DEFAULT_THETA = 10000.0


def integer(config: Config, key: str, default: Any = None) -> int:
    """A positive integer; null counts as missing. Raises UnsupportedModelError."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{key} {value!r} of the configuration is not a positive integer")
    return value


def number(config: Config, key: str, default: Any = None) -> float:
    """A positive number; null counts as missing. Raises UnsupportedModelError."""
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UnsupportedModelError(f"{key} {value!r} of the configuration is not a positive number")
    return float(value)


def activation(config: Config, key: str, default: str) -> str:
    name = _value(config, key, default)
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise UnsupportedModelError(f"activation {name!r} is not supported; supported are: {known}")
    return str(name)


def rope(config: Config, head_dim: int) -> Rope:
    """How positions turn a head's channels. Raises UnsupportedModelError."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(f"rope parameters {given!r} are not supported")
    theta = number(given, "rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    share = number(given, "partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    dim = int(head_dim * share)
    if dim % 2:
        raise UnsupportedModelError(f"rotary embedding of {dim} channels is not supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return Rope(dim, theta)
    if kind == "linear":
        return Rope(dim, theta, LinearScaling(number(given, "factor")))
    if kind == "llama3":
        factor, low, high = (number(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        return Rope(dim, theta, Llama3Scaling(factor, low, high, _original_length(config, given)))
    if kind == "yarn":
        return _yarn(config, given, dim, theta)
    known = "default, linear, llama3, yarn"
    raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are: {known}")


def _yarn(config: Config, given: Config, dim: int, theta: float) -> Rope:
    factor = number(given, "factor")
    scaling = YarnScaling(
        factor,
        _original_length(config, given),
        number(given, "beta_fast", 32.0),
        number(given, "beta_slow", 1.0),
        given.get("truncate", True),
    )
    amplitude = given.get("attention_factor")
    if amplitude is None:
        over, under = given.get("mscale"), given.get("mscale_all_dim")
        amplitude = _magnitude(factor, 1.0)
        if over and under:
            amplitude = _magnitude(factor, over) / _magnitude(factor, under)
    return Rope(dim, theta, scaling, amplitude)


def _magnitude(factor: float, weight: float) -> float:
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _original_length(config: Config, given: Config) -> int:
    key = "original_max_position_embeddings"
    return integer(config, key, given.get(key) or config.get("max_position_embeddings"))


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UnsupportedModelError(f"{key} is missing in the model's configuration")
    return value
