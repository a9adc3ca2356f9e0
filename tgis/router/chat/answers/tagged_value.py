"""Converts values between tags to JSON."""

import json
from typing import Any

from tgis.router.chat.answers.json_text import write_json

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def to_json(text: str, is_text: bool) -> str:
    """Return a value as JSON. Without `is_text`, the value is JSON itself, or else a text."""
    if not is_text:
        stripped = text.strip()
        if _is_json(stripped):
            return stripped
        if stripped in _PYTHON:
            return _PYTHON[stripped]
    return write_json(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_fail)
    except (ValueError, RecursionError):
        return False
    return True


def _fail(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
