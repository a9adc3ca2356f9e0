"""Patterns of property names in addition to listed names."""

import re

from tgis.router.grammar.json_schema.subschemas import Schema

# Pattern that lists a few names: ^name$ or ^(name|other)$.
_NAMES = re.compile(r"\^(?:\((?:\?:)?)?([\w \-]*(?:\|[\w \-]*)*)(?:\))?\$")
MAX_NAMES = 64


def list_named_properties(schema: Schema) -> None:
    """Replace patterns that match only a few names by properties with these names.

    The grammar library has a rule for each listed name and one for all other names that match the pattern. If
    all names of the pattern were listed or required, it could begin another name and never complete it."""
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
    """Return the names that a pattern lists; None if it is no list of names, or a long one."""
    match = _NAMES.fullmatch(pattern)
    if match is None or ("|" in match[1]) != ("(" in pattern):
        return None
    names = list(dict.fromkeys(match[1].split("|")))
    return names if len(names) <= MAX_NAMES else None
