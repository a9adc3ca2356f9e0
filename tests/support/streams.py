"""Streams of the public service as a client reads them."""

from collections.abc import Iterable
from typing import TypeVar

from tgis.pb import generation_pb2 as pb

Response = TypeVar("Response", bound=pb.GenerationResponse)


def join_stream(messages: Iterable[Response]) -> Response:
    """Return the messages of a stream as one: texts and lists are appended, and later values replace earlier
    ones. How many tokens share a message depends on the load, so streams are compared joined."""
    first, *rest = messages
    whole = type(first)()
    whole.CopyFrom(first)
    for message in rest:
        text = whole.text + message.text
        whole.MergeFrom(message)
        whole.text = text
    return whole
