"""Tests a client that leaves while the service sends to it. gRPC reports the failed send and the cancelled
call in any order. A send that fails first is rare and cannot be caused from outside, so contexts stand in for
calls."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
import pytest

from tgis.router.api.grpc.call_status import Context, Status, end_call
from tgis.router.api.grpc.slow_clients import SlowClients


class GoneClient:
    """Context of a call whose sends fail."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        raise grpc.aio.InternalError("failed")

    async def abort(self, *status: Any) -> None:
        raise grpc.aio.InternalError("failed")


CONTEXT = cast(Context, GoneClient())


async def test_a_stream_ends_as_a_cancelled_one() -> None:
    endings: list[BaseException] = []

    async def responses() -> AsyncGenerator[str, None]:
        try:
            yield "text"
        except BaseException as error:
            endings.append(error)
            raise

    stream = responses()
    with pytest.raises(asyncio.CancelledError):
        await SlowClients(10).send(stream, CONTEXT)
    await stream.aclose()
    assert [type(error) for error in endings] == [GeneratorExit]


async def test_an_undelivered_status_counts_as_a_cancelled_call() -> None:
    with pytest.raises(asyncio.CancelledError):
        await end_call(CONTEXT, Status(grpc.StatusCode.INVALID_ARGUMENT, "text"))
