"""Server-sent events of a streamed answer."""

from typing import Any

from tgis.router.api.http.json_bodies import encode_json

DONE = b"data: [DONE]\n\n"


def encode_event(value: Any) -> bytes:
    return b"data: %b\n\n" % encode_json(value)
