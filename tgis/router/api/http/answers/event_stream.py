"""Streams answers as events."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tgis.net.http.slow_readers import SlowReadError
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.errors import SlowClientError

BEGIN, BODY = "http.response.start", "http.response.body"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
SERVER_SENT_EVENTS, JSON_LINES = "text/event-stream", "application/jsonlines"
COMMENT = b":\n\n"  # keeps an idle connection open
DONE = b"data: [DONE]\n\n"
"""Last event of a stream of chunks."""
STREAM_TYPES = (SERVER_SENT_EVENTS, JSON_LINES)


def encode_event(value: Any) -> bytes:
    return b"data: %b\n\n" % encode_json(value)


class EventStream(Response):
    """Answer whose body is events: each is `data: …` and two line ends, or a line of JSON. The answer begins
    with the first event, so that an error before it can have a status."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        media_type: str = SERVER_SENT_EVENTS,
        silence_s: float | None = None,
    ) -> None:
        """Take the events. The client gets a comment after each `silence_s` seconds without an event."""
        super().__init__(headers=HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._silence_s = silence_s
        self._rewrite: Callable[[bytes], bytes] | None = None

    def rewrite(self, rewrite: Callable[[bytes], bytes], media_type: str) -> None:
        """Send every event rewritten, with another media type."""
        self._rewrite = rewrite
        self.headers["content-type"] = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. If the client does not read, throw SlowClientError into the events."""
        if self._silence_s is None:
            await self._send_all(send)
            return
        async with _unsilenced(send, self._silence_s) as heard:
            await self._send_all(heard)

    async def _send_all(self, send: Send) -> None:
        has_begun = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not has_begun:
                    has_begun = True
                    await send({"type": BEGIN, "status": self.status_code, "headers": self.raw_headers})
                try:
                    body = event if self._rewrite is None else self._rewrite(event)
                    await send({"type": BODY, "body": body, "more_body": True})
                except SlowReadError:
                    with suppress(SlowClientError, StopAsyncIteration):
                        await events.athrow(SlowClientError())
                    raise
        if not has_begun:
            await send({"type": BEGIN, "status": self.status_code, "headers": self.raw_headers})
        await send({"type": BODY, "body": b"", "more_body": False})


@asynccontextmanager
async def _unsilenced(send: Send, silence_s: float) -> AsyncIterator[Send]:
    """Yield a function that sends like `send`. After its first message, comments fill the pauses between
    messages. If the client does not read a comment, the next message raises the error."""
    is_sending = True
    sent_at = time.monotonic()

    async def heard(message: Message) -> None:
        nonlocal is_sending, sent_at
        is_sending = True
        await send(message)
        is_sending = False
        sent_at = time.monotonic()

    async def comment() -> None:
        nonlocal sent_at
        while True:
            await asyncio.sleep(max(sent_at + silence_s - time.monotonic(), 0) or silence_s)
            if not is_sending and time.monotonic() >= sent_at + silence_s:
                await send({"type": BODY, "body": COMMENT, "more_body": True})
                sent_at = time.monotonic()

    task = asyncio.create_task(comment())
    try:
        yield heard
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, SlowReadError):
            await task
