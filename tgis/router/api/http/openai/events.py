"""Server-sent events of a streamed answer."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def encode_event(value: Any) -> bytes:
    return b"data: %b\n\n" % _encode(value)
