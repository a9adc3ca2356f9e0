"""Gives the application access to the state of a response, and sends responses to HTTP/1.0 clients."""

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Answer:
    """State of a response on its connection; the application reads it as `scope["state"]["answer"]`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.headers = cycle.default_headers = list(cycle.default_headers)
        """Headers that are sent with every response."""

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started


def send_for_version(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` that does not use chunked encoding for an HTTP/1.0 client.

    The end of the connection then ends a body without a length."""
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
