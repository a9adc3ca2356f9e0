"""Refuses configurations that ask for unsupported computations, with errors of one line."""

from typing import Any

from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec.config_reader import Config


def refuse_others(config: Config, **served: Any) -> None:
    """Check that every key is absent, null or has a served value. A tuple holds several served values.

    Raises UnsupportedModelError."""
    for key, values in served.items():
        given = config.get(key)
        if given is not None and given not in (values if isinstance(values, tuple) else (values,)):
            raise UnsupportedModelError(f"{key} {given!r} of the configuration is not supported")


def section(config: Config, key: str) -> Config:
    """Return a nested part of the configuration, empty if it is absent. Raises UnsupportedModelError."""
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise UnsupportedModelError(f"{key} {found!r} of the configuration is not supported")
    return found or {}
