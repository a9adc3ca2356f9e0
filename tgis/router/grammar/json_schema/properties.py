"""Patterns of property names beside listed names."""

import re

from tgis.router.grammar.json_schema.subschemas import Schema

# A pattern of a few names: ^name$ or ^(name|other)$.
_NAMES = re.compile(r"\^(?:\((?:\?:)?)?([\w \-]*(?:\|[\w \-]*)*)(?:\))?\$")
MAX_NAMES = 64


def list_named_properties(schema: Schema) -> None:
    """Turn patterns that only a few names match into properties of these names.

    The grammar library writes a listed name by its own rule and all others by the pattern. If all names of
    the pattern are listed or required, it would begin another one and find none."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict) or not isinstance(schema.get("properties", {}), dict):
        return
    for pattern in list(patterns):
        if (names := _read_names(pattern)) is not None:
            properties = schema.setdefault("properties", {})
            value = patterns.pop(pattern)
            for name in names:
                properties[name] = {"allOf": [properties[name], value]} if name in properties else value
    if not patterns:
        del schema["patternProperties"]


def _read_names(pattern: str) -> list[str] | None:
    """Return the names that a pattern matches; None if they are not a few, each spelled out."""
    found = _NAMES.fullmatch(pattern)
    if found is None or ("|" in found[1]) != ("(" in pattern):
        return None
    names = list(dict.fromkeys(found[1].split("|")))
    return names if len(names) <= MAX_NAMES else None
