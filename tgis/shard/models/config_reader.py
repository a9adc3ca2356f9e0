"""Reads and validates values of a checkpoint's config.json. Errors have one line.

Rotary embeddings have two forms: `rope_parameters` (transformers 5), which may have one entry per layer type,
and `rope_scaling` with `rope_theta` (earlier versions)."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, log, sqrt
from typing import Any, TypeGuard

from tgis.shard.layers.activation import NAMES
from tgis.shard.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from tgis.shard.models.interface import ConfigurationError, UnsupportedModelError

Config = Mapping[str, Any]

DEFAULT_THETA = 10000.0
MAX_INTEGER = (1 << 31) - 1  # sizes and ids are 32 bits wide in kernels and messages
# Limits of float32, without subnormal numbers.
MIN_FLOAT = 2.0**-126
MAX_FLOAT = 2.0**128 - 2.0**104


def integer(config: Config, key: str, default: Any = None) -> int:
    """Return a positive integer. null means missing. Raises ConfigurationError."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{key} {value!r} of the configuration is not a positive integer")
    if value > MAX_INTEGER:
        raise ConfigurationError(f"{key} {value} of the configuration is larger than {MAX_INTEGER}")
    return value


def count(config: Config, key: str, default: int) -> int:
    """Return a positive integer or 0. null means missing. Raises ConfigurationError."""
    value = config.get(key)
    return 0 if value == 0 and type(value) is int else integer(config, key, default)


def number(config: Config, key: str, default: Any = None) -> float:
    """Return a positive number of float32. null means missing. Raises ConfigurationError."""
    value = _value(config, key, default)
    if not is_number(value) or not 0 < value < inf:
        raise ConfigurationError(f"{key} {value!r} of the configuration is not a positive number")
    if not MIN_FLOAT <= value <= MAX_FLOAT:
        shown = reprlib.repr(value)  # an integer may have thousands of digits
        raise ConfigurationError(f"{key} {shown} of the configuration is outside the range of float32")
    return float(value)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(config: Config, key: str, length: int) -> tuple[float, ...]:
    """Return a list of positive numbers, or ones if it is missing or null. Raises ConfigurationError."""
    values = config.get(key)
    if values is None:
        return (1.0,) * length
    if not isinstance(values, list | tuple) or len(values) != length:
        raise ConfigurationError(f"{key} {values!r} of the configuration is not a list of {length} numbers")
    return tuple(number({key: value}, key) for value in values)


def optional_integer(config: Config, key: str) -> int | None:
    """Return a positive integer, or None if it is missing or null. Raises ConfigurationError."""
    return None if config.get(key) is None else integer(config, key)


def optional_number(config: Config, key: str) -> float | None:
    """Return a positive number, or None if it is missing or null. Raises ConfigurationError."""
    return None if config.get(key) is None else number(config, key)


def divide_heads(hidden_size: int, num_heads: int) -> int:
    """Return the number of channels of a head. Raises ConfigurationError."""
    if hidden_size % num_heads:
        raise ConfigurationError(f"{num_heads} attention heads do not divide {hidden_size} channels")
    return hidden_size // num_heads


def activation(config: Config, key: str, default: str) -> str:
    name = _value(config, key, default)
    if not isinstance(name, str) or name not in NAMES:
        known = ", ".join(NAMES)
        raise UnsupportedModelError(f"activation {name!r} is not supported; supported are: {known}")
    return name


def refuse_others(config: Config, **served: Any) -> None:
    """Raise UnsupportedModelError if a key has a value other than null and its served values (one or a
    tuple)."""
    for key, values in served.items():
        given = config.get(key)
        if given is not None and given not in (values if isinstance(values, tuple) else (values,)):
            raise UnsupportedModelError(f"{key} {given!r} of the configuration is not supported")


def refuse_partial_rope(config: Config) -> None:
    """Raise UnsupportedModelError if only a part of a head's channels is to be rotated."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = (config, given, *given.values()) if isinstance(given, Mapping) else (config,)
    for part in parts:
        if isinstance(part, Mapping) and part.get("rope_type") != "proportional":
            refuse_others(part, partial_rotary_factor=1.0)


def section(config: Config, key: str) -> Config:
    """Return a nested section of the configuration, or an empty one. Raises UnsupportedModelError."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise UnsupportedModelError(f"{key} {value!r} of the configuration is not supported")
    return value or {}


def rope(config: Config, head_dim: int, layer_type: str = "full_attention") -> Rope:
    """Return the rotary embedding of layers of one type. Raises UnsupportedModelError.

    Parameters without layer types belong to `full_attention`. Other layers then have no scaling, and their
    theta is `rope_local_base_freq` if the configuration has it."""
    given = _rope_parameters(config, layer_type)
    theta = config.get("rope_theta") or DEFAULT_THETA
    if layer_type != "full_attention":
        theta = config.get("rope_local_base_freq") or theta
    theta = number(given, "rope_theta", theta)
    if theta == 1:
        raise ConfigurationError("rope_theta 1 of the configuration would rotate all channels alike")
    share = number(given, "partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    dim = head_dim if kind == "proportional" else int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise UnsupportedModelError(f"rotary embedding of {dim} channels is not supported")
    if kind == "su" or (kind == "yarn" and "long_factor" in given):
        kind = "longrope"  # names in the first releases of Phi 3
    if kind not in list(_SCALED):
        known = ", ".join(_SCALED)
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are: {known}")
    return _SCALED[kind](config, given, Rope(dim, theta))


def _rope_parameters(config: Config, layer_type: str) -> Config:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"rope parameters {given!r} are not supported")
    if any(isinstance(value, Mapping) for value in given.values()):
        parameters = given.get(layer_type) or {}
        if not isinstance(parameters, Mapping):
            raise UnsupportedModelError(f"rope parameters {parameters!r} are not supported")
        return parameters
    return given if layer_type == "full_attention" else {}


def _scale_proportional(config: Config, given: Config, plain: Rope) -> Rope:
    share = number(given, "partial_rotary_factor", 1.0)
    if share > 1:
        raise UnsupportedModelError(f"partial_rotary_factor {share} of the configuration is above 1")
    factor = number(given, "factor", 1.0)
    return replace(plain, scaling=ProportionalScaling(int(share * plain.dim // 2), factor))


def _scale_dynamic(config: Config, given: Config, plain: Rope) -> Rope:
    length = integer(config, "max_position_embeddings")
    return replace(plain, scaling=DynamicScaling(number(given, "factor"), length))


def _scale_llama3(config: Config, given: Config, plain: Rope) -> Rope:
    factor, low, high = (number(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return replace(plain, scaling=Llama3Scaling(factor, low, high, _original_length(config, given)))


def _scale_yarn(config: Config, given: Config, plain: Rope) -> Rope:
    length = _original_length(config, given)
    factor = _factor(config, given, length)
    fast, slow = number(given, "beta_fast", 32.0), number(given, "beta_slow", 1.0)
    scaling = YarnScaling(factor, length, fast, slow, bool(given.get("truncate", True)))
    mscale, mscale_all_dim = (read_mscale(given, key) for key in ("mscale", "mscale_all_dim"))
    amplitude = _magnitude(factor, 1.0)
    if mscale and mscale_all_dim:
        amplitude = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return replace(plain, scaling=scaling, amplitude=number(given, "attention_factor", amplitude))


def read_mscale(rope: Config, key: str) -> float | None:
    """Return a factor of YaRN, or None if it is missing, null or 0. Raises ConfigurationError."""
    return optional_number(rope, key) if rope.get(key) else None


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def _scale_long(config: Config, given: Config, plain: Rope) -> Rope:
    length = _original_length(config, given)
    factor = _factor(config, given, length)
    amplitude = sqrt(1 + log(factor) / log(max(length, 2))) if factor > 1 else 1.0
    amplitude = number(given, "attention_factor", amplitude)
    short, long = (_factors(given, f"{size}_factor", plain.dim // 2) for size in ("short", "long"))
    amplitudes = (number(given, f"{size}_mscale", amplitude) for size in ("short", "long"))
    return replace(plain, scaling=LongScaling(short, long, length, *amplitudes))


def _factors(given: Config, key: str, length: int) -> tuple[float, ...]:
    values = _value(given, key, None)
    is_list = isinstance(values, list) and all(is_number(x) and MIN_FLOAT <= x <= MAX_FLOAT for x in values)
    if not is_list or len(values) != length:
        raise UnsupportedModelError(f"{key} of the configuration is not a list of {length} positive numbers")
    return tuple(map(float, values))


def _factor(config: Config, given: Config, original_length: int) -> float:
    if given.get("factor") is not None:
        return number(given, "factor")
    return integer(config, "max_position_embeddings") / original_length


def _original_length(config: Config, given: Config) -> int:
    key = "original_max_position_embeddings"
    return integer(config, key, given.get(key) or config.get("max_position_embeddings"))


_SCALED: dict[str, Callable[[Config, Config, Rope], Rope]] = {
    "default": lambda config, given, plain: plain,
    "linear": lambda config, given, plain: replace(plain, scaling=LinearScaling(number(given, "factor"))),
    "dynamic": _scale_dynamic,
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
    "longrope": _scale_long,
    "proportional": _scale_proportional,
}


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigurationError(f"{key} is missing in the model's configuration")
    return value
