"""Converts values with bare keys, and texts between special quotes, to JSON."""

import json
import re
from collections.abc import Iterator
from math import isfinite
from typing import Any

from tgis.router.chat.answers.json_text import write_json

MAX_DEPTH = 64
_BARE = re.compile(r"[^,:\[\]{}]+")


def to_json(text: str, quote: str) -> str:
    """Return an object's text as JSON, or unchanged if it is malformed."""
    try:
        tokens = _split(text, quote)
        value = _read(next(tokens), tokens, 0)
        if next(tokens, None) is not None:
            return text
        return write_json(value)
    except (ValueError, StopIteration):
        return text


Token = tuple[str, Any]
"""Kind of a token ("text", "bare", or a character of the structure), and its value."""


def _split(text: str, quote: str) -> Iterator[Token]:
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
        elif text.startswith(quote, position):
            begin = position + len(quote)
            end = text.index(quote, begin)
            yield "text", text[begin:end]
            position = end + len(quote)
        elif text[position] == '"':
            value, position = json.JSONDecoder().raw_decode(text, position)
            yield "text", value
        elif text[position] in "{}[]:,":
            yield text[position], None
            position += 1
        else:
            match = _BARE.match(text, position)
            assert match is not None, "the first character matches"
            yield "bare", match[0].strip()
            position = match.end()


def _read(token: Token, tokens: Iterator[Token], depth: int) -> Any:
    """Return the value that begins with a token. Raises ValueError and StopIteration."""
    kind, value = token
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if kind == "text":
        return value
    if kind == "bare":
        return _read_bare(value)
    if kind == "[":
        return [item for _, item in _read_items("]", tokens, depth)]
    if kind == "{":
        return dict(_read_items("}", tokens, depth))
    raise ValueError("no value")


def _read_bare(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return None if text == "None" else text
    # JSON has no infinity and no NaN.
    return text if isinstance(value, float) and not isfinite(value) else value


def _read_items(end: str, tokens: Iterator[Token], depth: int) -> Iterator[tuple[Any, Any]]:
    """Yield the members of an object, or the items of a list with None as keys, up to the end."""
    token = _take(tokens)
    while token[0] != end:
        key = None
        if end == "}":
            key = token[1] if token[0] in ("text", "bare") else _fail()
            if _take(tokens)[0] != ":":
                _fail()
            token = _take(tokens)
        yield key, _read(token, tokens, depth + 1)
        token = _take(tokens)
        if token[0] == ",":
            token = _take(tokens)
        elif token[0] != end:
            _fail()


def _take(tokens: Iterator[Token]) -> Token:
    token = next(tokens, None)
    return _fail() if token is None else token


def _fail() -> Any:
    raise ValueError("the value is malformed")
