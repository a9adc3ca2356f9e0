"""Writes values as JSON that any encoding can carry."""

import json
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def write_json(value: Any) -> str:
    """Return a value as JSON, in which only surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
