"""Copies of soft prompts and adapters from the first rank's machine to that of another rank, unread."""

import asyncio
from typing import Any

import grpc

from tgis.pb import shard_pb2 as pb


async def relay(source: Any, target: Any, digest: str, timeout_s: float) -> None:
    """From one asynchronous stub to another, as fast as the slower of both. Raises grpc.aio.AioRpcError of
    whichever fails, ConnectionError where the target is cut off, and TimeoutError.

    The time limit is not gRPC's: a write that meets the end of a call hides how that ended."""
    fetching, putting = source.Fetch(pb.FetchRequest(digest=digest)), target.Put()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in fetching:
                await _write(putting, pb.PutRequest(digest=digest, data=part.data))
            await putting.done_writing()
            await putting
    finally:
        fetching.cancel()
        putting.cancel()


async def _write(putting: Any, request: pb.PutRequest) -> None:
    """A target says nothing before it has read everything, so that its call cannot be over."""
    try:
        await putting.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as error:
        raise ConnectionError("the target is gone") from error
