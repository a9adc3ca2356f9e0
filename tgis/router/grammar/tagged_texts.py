"""Patterns of texts between tags, which are not JSON, from the JSON schema of the text."""

import json
import re
from collections.abc import Iterable
from typing import Any

from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.reading import is_regex

# Keywords that forbid no text, besides those that are read below.
_NEUTRAL = {"type", "format", "title", "description", "default", "examples", "deprecated"}
_NEUTRAL |= {"$comment", "$defs", "definitions"}
_READ = {"minLength", "maxLength", "pattern"}
_ANYTHING = "(?s:.*)"
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_SLASH = re.compile(r"\\.|/", re.DOTALL)


def read_text_patterns(schema_text: str, is_strict: bool) -> list[str]:
    """Return patterns, for use between slashes in a grammar, that the whole text must match: none if any text
    may be written. Formats are ignored, and so are unsupported keywords unless the schema `is_strict`. Raises
    InvalidGrammarError."""
    schema = json.loads(schema_text)
    patterns = []
    shortest, longest = (_read_length(schema, key) for key in ("minLength", "maxLength"))
    if shortest or longest is not None:
        patterns.append(f"(?s:.{{{shortest or 0},{'' if longest is None else longest}}})")
    if "pattern" in schema and (whole := _match_whole(schema["pattern"])) is not None:
        patterns.append(whole)
    elif is_strict and "pattern" in schema:
        raise InvalidGrammarError("its pattern is not supported for a text between tags")
    if is_strict and (others := schema.keys() - _NEUTRAL - _READ):
        text = f"{min(others)[:40]!r} is not supported for a text between tags"
        raise InvalidGrammarError(text, quotes=True)
    return patterns


def matches_nothing(patterns: Iterable[str]) -> bool:
    """Return True if the empty text matches all patterns."""
    try:
        return all(re.fullmatch(pattern, "") for pattern in patterns)
    except re.error:
        return False


def _read_length(schema: dict[str, Any], key: str) -> int | None:
    value = schema.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _match_whole(pattern: Any) -> str | None:
    """Return a pattern of all texts in which a pattern occurs, or None if it is not supported."""
    if not isinstance(pattern, str) or not is_regex(pattern):
        return None
    parts = _PART.findall(pattern)
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = parts[begins : len(parts) - ends]
    depth = 0
    for part in inner:
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part in ("^", "$") or (part == "|" and not depth and (begins or ends)):
            return None
    quoted = _SLASH.sub(lambda match: match[0] if len(match[0]) > 1 else r"\/", "".join(inner))
    quoted = quoted.replace("\n", r"\n")
    return f"{'' if begins else _ANYTHING}(?:{quoted}){'' if ends else _ANYTHING}"
