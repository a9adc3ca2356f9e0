"""Copies artifacts (soft prompts and adapters) from the first rank's machine to another rank's."""

import asyncio
from typing import Any

import grpc

from tgis.pb import shard_pb2 as pb


async def copy_artifact(source: Any, target: Any, digest: str, timeout_s: float) -> None:
    """Copy an artifact from one asynchronous stub to another at the speed of the slower one. Raises
    grpc.aio.AioRpcError of the failing stub, ConnectionError if the target is lost, and TimeoutError.

    This does not use gRPC's deadline, because a write to an ended call hides the call's status."""
    fetching = source.Fetch(pb.FetchRequest(digest=digest))
    putting = target.Put()
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
    """Write a part. Raises ConnectionError if the call has ended: a target answers only after it has read
    everything."""
    try:
        await putting.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as error:
        raise ConnectionError("the target ended the call") from error
