"""Merges the streams of one call."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from tgis.router.api.service import Stream
from tgis.router.events import InputTokens, Output


async def merge(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, InputTokens | Output], None]:
    """Yield the outputs of all streams as they arrive, each with the index of its stream. Few outputs wait
    here while the reader is behind, so that further tokens of a stream are joined into one output. The first
    failure ends all streams. Close this generator before the streams, because it may be reading from them."""
    if len(streams) == 1:
        async for output in streams[0].outputs:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, InputTokens | Output] | Exception | None] = asyncio.Queue(len(streams))

    async def pump(index: int) -> None:
        try:
            async for output in streams[index].outputs:
                await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

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
