"""What only the asyncio client has: calls at once in one loop, and tasks that are cancelled."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.canned_service import CannedService, serve
from tgis.pb import generation_pb2 as pb
from tgis_client import AsyncClient, CallError, ClientError


class HeldService(CannedService):
    """Service whose unary answers, and streams from a message on, come only when the client has left."""

    def __init__(self, held_message: int) -> None:
        super().__init__()
        self._held_message = held_message
        self.num_held = 0
        self.left = threading.Event()

    def Generate(self, request: Any, context: Any) -> pb.BatchedGenerationResponse:
        self._wait(context)
        return super().Generate(request, context)

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerationResponse]:
        for index, message in enumerate(super().GenerateStream(request, context)):
            if index == self._held_message:
                self._wait(context)
            yield message

    def _wait(self, context: Any) -> None:
        self.num_held += 1
        if context.add_callback(self.left.set):
            self.left.wait(60)
        else:  # it has left already
            self.left.set()


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


async def until_held(service: HeldService, count: int) -> None:
    async with asyncio.timeout(60):
        while service.num_held < count:  # noqa: ASYNC110 - threads of the service add to it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_cancelled_task_leaves_its_call(is_begun: bool) -> None:
    service, has_begun = HeldService(2 if is_begun else 1), asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async for _ in client.stream("a"):
            has_begun.set()

    with serve(service) as target:
        async with AsyncClient(target) as client:
            task = asyncio.create_task(consume(client))
            await (has_begun.wait() if is_begun else until_held(service, 1))
            assert has_begun.is_set() is is_begun
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.left.wait, 30)
            assert (await client.model_info()).max_new_tokens == 128


async def test_a_closed_client_ends_its_calls() -> None:
    service = HeldService(1)
    with serve(service) as target:
        client = AsyncClient(target)
        tasks = [
            asyncio.create_task(client.generate("a")),
            asyncio.create_task(anext(client.stream("a"))),
        ]
        await until_held(service, 2)
        await client.aclose()
        for task in tasks:
            with pytest.raises(CallError, match="CANCELLED"):
                await task
        with pytest.raises(ClientError, match="closed"):
            await client.model_info()
