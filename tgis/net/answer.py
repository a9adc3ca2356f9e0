"""The answer to a request, as its connection sees it, and how it is sent to clients of HTTP/1.0."""

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Answer:
    """The answer to a request, as its connection sees it; `scope["state"]["answer"]`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.headers = cycle.default_headers = list(cycle.default_headers)
        """Headers that are sent whatever the answer is."""

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started


def send_for_version(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` that makes no chunks for a client of HTTP/1.0, which does not know them: the end of the
    connection ends a body that has no length."""
    if cycle.scope["http_version"] != "1.0":
        return send
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
