"""Converts the answers of chats and completions to LMI's form: each event of a stream is a line of JSON."""

from dataclasses import dataclass

from starlette.responses import Response

from tgis.router.api.http.answers.event_stream import DONE, JSON_LINES, EventStream
from tgis.router.api.http.errors import ErrorForm


@dataclass(frozen=True)
class ChatLineErrors:
    """Form of the errors of a chat or a completion."""

    errors: ErrorForm

    def respond(self, error: Exception) -> Response:
        return self.errors.respond(error)

    def last_events(self, error: Exception) -> bytes:
        return to_lines(self.errors.last_events(error))


def with_lines(response: Response) -> Response:
    if isinstance(response, EventStream):
        response.rewrite(to_lines, JSON_LINES)
    return response


def to_lines(events: bytes) -> bytes:
    """Return the objects of whole events as lines, without the final event of the stream."""
    frames = events.removesuffix(DONE).split(b"\n\n")
    return b"".join(frame.removeprefix(b"data: ") + b"\n" for frame in frames if frame)
