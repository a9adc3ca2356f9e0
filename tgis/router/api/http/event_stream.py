"""Answers with server-sent events, and merges the streams of one call."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tgis.router.api.service import Stream
from tgis.router.events import InputTokens, Output

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """Answer whose body is the bytes of events, each `data: …` and two line ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS | (headers or {}))
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def merge(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, InputTokens | Output]]:
    """Yield the outputs of all streams as they come, each with its stream's index. The first failure ends
    all of them."""
    if len(streams) == 1:
        async for output in streams[0].outputs:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, InputTokens | Output] | Exception | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for output in streams[index].outputs:
                queue.put_nowait((index, output))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_left = len(streams)
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
