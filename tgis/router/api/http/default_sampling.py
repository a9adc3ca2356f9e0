"""Reads the default values of sampling fields: from a model's generation_config.json, and from the operator's
options, which have precedence."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tgis.config.processes import RouterConfig
from tgis.config.serving import GENERATION_CONFIG_AUTO, GENERATION_CONFIG_NONE
from tgis.hub.model_files import ModelNotFoundError, read_json
from tgis.router.api.http.fields.invalid_fields import describe_invalid
from tgis.router.api.http.fields.shared_fields import MAX_COUNT, SharedFields
from tgis.router.errors import StartupError

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that generation_config.json and requests share."""


class DefaultFields(SharedFields, kw_only=True):
    """Fields of requests that have default values, and their ranges."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """0 and -1 keep all tokens."""
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


def read_default_sampling(config: RouterConfig) -> dict[str, float]:
    """Return values for the fields that requests do not set. Raises StartupError."""
    return _read_chosen_file(config) | _read_overrides(config.override_generation_config)


def set_default_sampling(fields: DefaultFields, defaults: Mapping[str, float]) -> None:
    """Set the fields that a request leaves out or sets to null."""
    for name, value in defaults.items():
        if getattr(fields, name) is None:
            setattr(fields, name, value)


def _read_chosen_file(config: RouterConfig) -> dict[str, float]:
    if config.generation_config == GENERATION_CONFIG_NONE:
        return {}
    if config.generation_config != GENERATION_CONFIG_AUTO:
        return _read_directory(Path(config.generation_config))
    try:
        return _read_file(Path(config.model_sampling_path)) if config.model_sampling_path else {}
    except ModelNotFoundError as error:
        logger.warning("the model's own sampling is not used: %s", error)
        return {}


def _read_directory(directory: Path) -> dict[str, float]:
    path = directory / FILE
    try:
        if not path.is_file():
            raise StartupError(f"generation_config: {path} is not a file")
        return _read_file(path)
    except ModelNotFoundError as error:
        raise StartupError(f"generation_config: {error}") from error
    except OSError as error:
        raise StartupError(f"generation_config: {path} cannot be read: {error.strerror}") from error


def _read_file(path: Path) -> dict[str, float]:
    """Return the usable values of a generation_config.json. Raises ModelNotFoundError."""
    content = read_json(path.parent, path.name)
    if content.get("do_sample") is False:  # then the fields that affect only sampling mean nothing
        content = {"temperature": 0.0, "repetition_penalty": content.get("repetition_penalty")}
    usable: dict[str, float] = {}
    for name in NAMES:
        if content.get(name) is None:
            continue
        try:
            usable[name] = _to_value(name, content[name])
        except ValueError as error:
            logger.warning("a value in %s is not used: %s", path, error)
    return usable


def _read_overrides(text: str | None) -> dict[str, float]:
    try:
        content = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StartupError("override_generation_config: it is no JSON object") from error
    for name in content:
        if name not in NAMES:
            raise StartupError(f"override_generation_config: {name!r} is none of {', '.join(NAMES)}")
    try:
        return {name: _to_value(name, value) for name, value in content.items()}
    except ValueError as error:
        raise StartupError(f"override_generation_config: {error}") from error


def _to_value(name: str, value: Any) -> float:
    """Return a value if requests may have it. Raises ValueError, which names the field."""
    try:
        number: float | None = getattr(msgspec.convert({name: value}, DefaultFields), name)
    except msgspec.ValidationError as error:
        raise ValueError(describe_invalid(error, DefaultFields).text) from error
    if number is None or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number")
    return number
