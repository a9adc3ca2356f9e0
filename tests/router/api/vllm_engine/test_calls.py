"""Tests aborts of calls in tasks of asyncio, whatever a call is doing when it is aborted."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tgis.router.api.vllm_engine.calls import AbortedError, LiveCalls
from tgis.router.engine.handle import CallName


class Scene:
    """A call whose responses wait for numbers, and whose client waits before it reads each of them."""

    def __init__(self, calls: LiveCalls, tenant: str = "a") -> None:
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self.reads = asyncio.Semaphore(0)
        self.read: list[int] = []
        self.is_closed = False
        self.task = asyncio.create_task(self._read(calls.run(CallName(tenant, "id"), self._respond())))

    async def _respond(self) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield await self.numbers.get()
        finally:
            self.is_closed = True

    async def _read(self, responses: AsyncGenerator[int, None]) -> str:
        try:
            async for number in responses:
                self.read.append(number)
                await self.reads.acquire()
        except AbortedError:
            return "aborted"
        return "ended"


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_that_waits_for_a_response_ends() -> None:
    calls = LiveCalls()
    scene, other = Scene(calls), Scene(calls, "b")
    await turns()
    assert calls.abort(CallName("a", "id"))
    assert not calls.abort(CallName("a", "id"))
    assert await scene.task == "aborted"
    assert scene.is_closed
    assert not other.is_closed
    assert calls.abort(CallName("b", "id"))
    assert await other.task == "aborted"


async def test_a_call_ends_after_the_response_that_it_is_sending() -> None:
    calls = LiveCalls()
    scene = Scene(calls)
    scene.numbers.put_nowait(1)
    scene.numbers.put_nowait(2)
    await turns()
    assert calls.abort(CallName("a", "id"))
    await turns()
    assert not scene.task.done()
    scene.reads.release()
    assert await scene.task == "aborted"
    assert (scene.read, scene.is_closed) == ([1], True)


@pytest.mark.parametrize("is_sending", [False, True])
async def test_a_client_that_leaves_an_aborted_call_cancels_it(is_sending: bool) -> None:
    calls = LiveCalls()
    scene = Scene(calls)
    if is_sending:
        scene.numbers.put_nowait(1)
    await turns()
    assert calls.abort(CallName("a", "id"))
    scene.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scene.task
    assert not calls.abort(CallName("a", "id"))
