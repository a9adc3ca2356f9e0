"""Defines the constraints that requests may have, and checks the texts made with them."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tgis.load.errors import LoadError

RuleKind = Literal["json", "regex", "choice"]


@dataclass(frozen=True)
class TextRule:
    """Constraint of a text."""

    kind: RuleKind
    value: Any
    """JSON Schema, regular expression or list of texts."""


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "known": {"type": "boolean"},
    },
    "required": ["name", "count", "known"],
    "additionalProperties": False,
}
RULES = {
    "json": TextRule("json", SCHEMA),
    "regex": TextRule("regex", r"[a-z]{1,8}-[0-9]{1,4}"),
    "choice": TextRule("choice", ["yes", "no", "unknown"]),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


def parse_shares(text: str) -> tuple[tuple[str, float], ...]:
    """Read `json=0.2,regex=0.1`. Raises LoadError."""
    shares = []
    for part in filter(None, text.split(",")):
        name, _, share = part.partition("=")
        try:
            shares.append((name.strip(), float(share)))
        except ValueError as error:
            raise LoadError(f"{part!r} is not NAME=SHARE") from error
    unknown = [name for name, _ in shares if name not in RULES]
    if unknown or any(share < 0 for _, share in shares) or sum(share for _, share in shares) > 1:
        raise LoadError(f"{text!r} is not a list of shares of {', '.join(RULES)} whose sum is at most 1")
    return tuple(shares)


def draw_rule(shares: Sequence[tuple[str, float]], source: random.Random) -> TextRule | None:
    if not shares:
        return None
    drawn = source.random()
    for name, share in shares:
        if drawn < share:
            return RULES[name]
        drawn -= share
    return None


def follows(rule: TextRule, text: str) -> bool:
    """Return True if a complete text is one that the constraint allows.

    Of a JSON Schema, it checks the types and the required names of the outermost object."""
    if rule.kind == "regex":
        return re.fullmatch(rule.value, text, re.DOTALL) is not None
    if rule.kind == "choice":
        return text in rule.value
    try:
        value = json.loads(text)
    except ValueError:
        return False
    schema = rule.value if isinstance(rule.value, dict) else json.loads(rule.value)
    return _fits(schema, value)


def _fits(schema: dict[str, Any], value: Any) -> bool:
    kind = schema.get("type")
    if kind in _TYPES and (
        not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return False
    if not isinstance(value, dict):
        return True
    named = schema.get("properties", {})
    return all(name in value for name in schema.get("required", ())) and all(
        _fits(named[name], part) for name, part in value.items() if name in named
    )
