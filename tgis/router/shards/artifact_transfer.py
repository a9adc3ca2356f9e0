"""Copies soft prompts and adapters from the first rank's machine to another rank's, without reading them."""

import asyncio
from typing import Any

import grpc

from tgis.pb import shard_pb2 as pb


async def copy_artifact(source: Any, target: Any, digest: str, timeout_s: float) -> None:
    """Copy an artifact from one asynchronous stub to another, as fast as the slower of the two. Raises
    grpc.aio.AioRpcError of the stub that fails, ConnectionError if the target is cut off, and TimeoutError.

    The time limit is not gRPC's: a write that meets the end of a call hides how that call ended."""
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
    """Write a part. A target answers only after it has read everything, so its call cannot have ended
    normally before that."""
    try:
        await putting.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as error:
        raise ConnectionError("the target ended the call") from error
