"""Reads bodies of requests, which are JSON."""

import re
from typing import TypeVar

import msgspec

from tgis.router.errors import RequestError

T = TypeVar("T")


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
