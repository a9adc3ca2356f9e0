"""Reads bodies of requests, which are JSON, and encodes answers."""

import re
from typing import Any, TypeVar

import msgspec

from tgis.router.errors import RequestError

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
# The ends of lines, to `str.splitlines`, that JSON need not escape. In JSON they are in strings only.
_NEXT_LINE, _LINE_SEPARATOR, _PARAGRAPH_SEPARATOR = "\x85".encode(), "\u2028".encode(), "\u2029".encode()
# Their first bytes, which are searched for before, because that is faster.
_LATIN, _PUNCTUATION = _NEXT_LINE[0], _LINE_SEPARATOR[0]


def encode_json(value: Any) -> bytes:
    """Return a value as JSON that is one line to every reader."""
    text = _encode(value)
    if text.isascii():
        return text
    if _LATIN in text:
        text = text.replace(_NEXT_LINE, rb"\u0085")
    if _PUNCTUATION in text:
        text = text.replace(_LINE_SEPARATOR, rb"\u2028").replace(_PARAGRAPH_SEPARATOR, rb"\u2029")
    return text


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the request in a body. Raises RequestError, which names the field and quotes no value of it."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$.")
        field = re.sub(r"\.?\[.*", "", param)
        shown = f"{field}: {text}" if field else f"the body: {text}"
        raise RequestError(shown, field) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
