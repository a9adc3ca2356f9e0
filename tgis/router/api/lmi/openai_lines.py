"""Streams of OpenAI's API as lines of JSON, which is how LMI answers chats and completions."""

from starlette.responses import Response

from tgis.router.api.http.event_stream import JSON_LINES, EventStream
from tgis.router.api.openai.errors import OPENAI_ERRORS
from tgis.router.api.openai.events import DONE


class OpenAiLineErrors:
    """Form of the errors of a chat or a completion."""

    def respond(self, error: Exception) -> Response:
        return OPENAI_ERRORS.respond(error)

    def last_events(self, error: Exception) -> bytes:
        return to_lines(OPENAI_ERRORS.last_events(error))


def with_lines(response: Response) -> Response:
    if isinstance(response, EventStream):
        response.rewrite(to_lines, JSON_LINES)
    return response


def to_lines(events: bytes) -> bytes:
    """Return the objects of whole events, without the mark of a stream's end."""
    frames = events.removesuffix(DONE).split(b"\n\n")
    return b"".join(frame.removeprefix(b"data: ") + b"\n" for frame in frames if frame)
