"""Describes what is wrong with a text that is not JSON, and where, without any of the text."""

import re

import msgspec

INVALID_JSON = "the body is not valid JSON in UTF-8"

_REASON = re.compile(r"JSON is malformed: (.+) \(byte (\d+)\)")


def describe_invalid_json(error: msgspec.DecodeError | UnicodeDecodeError, text: bytes) -> str:
    """Return why msgspec cannot read a text."""
    if not text.strip():
        return "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return _invalid_bytes(text)
    if malformed := _REASON.fullmatch(str(error)):
        return f"{malformed[1]} at {_place(text, int(malformed[2]))}"
    return "it ends too early"


def _invalid_bytes(text: bytes) -> str:
    """Return where a text is not UTF-8. The library's position is one in a string of the text."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"bytes that are not UTF-8 at {_place(text, error.start)}"
    return "a string is not valid Unicode"


def _place(text: bytes, position: int) -> str:
    """Return the line and column of a byte. Columns count bytes."""
    line = text.count(b"\n", 0, position) + 1
    column = position - text.rfind(b"\n", 0, position)
    return f"line {line}, column {column}"
