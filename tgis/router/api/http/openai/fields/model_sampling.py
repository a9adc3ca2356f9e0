"""Reads how a model's makers sample it, for clients that ask. Requests without these fields have the API's
own defaults."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from tgis.hub.model_files import ModelNotFoundError, read_json
from tgis.router.api.http.openai.fields.sampling_fields import SamplingFields

logger = logging.getLogger(__name__)

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that generation_config.json and requests have in common."""


def read_model_sampling(path: Path) -> dict[str, float]:
    """Return the fields of a generation_config.json that a request may have, with their values."""
    try:
        content = read_json(path.parent, path.name)
    except ModelNotFoundError as error:
        logger.warning("the model's own sampling is not shown: %s", error)
        return {}
    if content.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: content[name] for name in NAMES if _is_valid(name, content.get(name))}


def _is_valid(name: str, value: Any) -> bool:
    if value is None:
        return False
    try:
        msgspec.convert({name: value}, SamplingFields)
    except msgspec.ValidationError:
        return False
    return True
