"""What only the asyncio client has: calls at once in one loop, and tasks that are cancelled."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.canned_service import CannedService, serve
from tgis.pb import generation_pb2 as pb
from tgis_client import AsyncClient, CallError, ClientError


class WatchingService(CannedService):
    """Service that notes when a client leaves a stream."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.left = threading.Event()

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerationResponse]:
        context.add_callback(self.left.set)
        yield from super().GenerateStream(request, context)


class JointService(CannedService):
    """Service that answers when eight calls wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = threading.Barrier(8)

    def Generate(self, request: Any, context: Any) -> pb.BatchedGenerationResponse:
        self._arrivals.wait(30)
        return super().Generate(request, context)


async def test_calls_run_at_once() -> None:
    with serve(JointService()) as target:
        async with AsyncClient(target) as client:
            texts = [each.text for each in await asyncio.gather(*map(client.generate, "abcdefgh"))]
    assert texts == [f"{letter}: one two three" for letter in "abcdefgh"]


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_cancelled_task_leaves_its_call(is_begun: bool) -> None:
    service, has_begun = WatchingService(delay=0.3), asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async for _ in client.stream("a"):
            has_begun.set()

    with serve(service) as target:
        async with AsyncClient(target) as client:
            task = asyncio.create_task(consume(client))
            await (has_begun.wait() if is_begun else asyncio.sleep(0.1))
            assert has_begun.is_set() is is_begun
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.left.wait, 0.2)
            assert (await client.model_info()).max_new_tokens == 128


async def test_a_closed_client_ends_its_calls() -> None:
    with serve(CannedService(delay=1.0)) as target:
        client = AsyncClient(target)
        tasks = [
            asyncio.create_task(client.generate("a")),
            asyncio.create_task(anext(client.stream("a"))),
        ]
        await asyncio.sleep(0.1)
        await client.aclose()
        for task in tasks:
            with pytest.raises(CallError, match="CANCELLED"):
                await task
        with pytest.raises(ClientError, match="closed"):
            await client.model_info()
