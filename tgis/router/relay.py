"""Copies of soft prompts and adapters from the first rank's machine to that of another rank, unread."""

import asyncio
from typing import Any

from tgis.pb import shard_pb2 as pb


async def relay(source: Any, target: Any, digest: str, timeout_s: float) -> None:
    """From one asynchronous stub to another, as fast as the slower of both. Raises grpc.aio.AioRpcError of
    whichever fails."""
    fetching = source.Fetch(pb.FetchRequest(digest=digest), timeout=timeout_s)
    putting = target.Put(timeout=timeout_s)
    try:
        async for part in fetching:
            await putting.write(pb.PutRequest(digest=digest, data=part.data))
        await putting.done_writing()
    except asyncio.InvalidStateError:
        pass  # it has ended before all was written: what follows says why
    finally:
        fetching.cancel()
    await putting
