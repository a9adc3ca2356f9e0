"""Streams of the public service as read by clients."""

import json
from collections.abc import Iterable
from typing import Any, TypeVar

from tgis.pb import generation_pb2 as pb

Response = TypeVar("Response", bound=pb.GenerationResponse)


def join_stream(messages: Iterable[Response]) -> Response:
    """Join the messages of a stream into one: texts and lists are concatenated, and later values replace
    earlier ones. The number of tokens per message depends on load, so streams are compared joined."""
    first, *rest = messages
    whole = type(first)()
    whole.CopyFrom(first)
    for message in rest:
        text = whole.text + message.text
        whole.MergeFrom(message)
        whole.text = text
    return whole


def read_chunks(body: bytes) -> list[Any]:
    """Return the events of a stream of completions or chats, without the final `[DONE]`."""
    *frames, done, end = body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def join_choices(chunks: list[Any]) -> tuple[dict[int, Any], Any]:
    """Return the choices by index, and the usage of the whole call."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            fields = {**choice}
            index = fields.pop("index")
            if calls := fields.get("delta", {}).get("tool_calls"):
                by_index = {each["index"]: each["function"] for each in calls}
                fields["delta"] = {**fields["delta"], "tool_calls": by_index}
            choices[index] = join_parts(choices.get(index), fields)
    assert not chunks[-1]["choices"]
    return choices, chunks[-1]["usage"]


def join_parts(joined: Any, more: Any) -> Any:
    """Join two chunks: texts and lists are concatenated, objects are joined by field."""
    if joined is None or more is None:
        return more if joined is None else joined
    if isinstance(joined, dict):
        return {name: join_parts(joined.get(name), more.get(name)) for name in joined | more}
    return joined + more if isinstance(joined, str | list) else more
