"""Requests of worker pools, with the real grammar workers."""

import asyncio
from collections.abc import Iterator

import pytest

from tgis.process.worker_pool import WorkerPool
from tgis.router.grammar.compiler import WORKER

REQUEST = ["regex", "a", None]


@pytest.fixture(params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    pool = WorkerPool(WORKER, request.param, 30.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("num_callers", [1, 2, 3])
async def test_an_immediate_second_call_is_answered(pool: WorkerPool, num_callers: int) -> None:
    """The next request is sent in the iteration of the event loop in which the previous reply arrives."""

    async def ask_often(owner: int) -> list[bool]:
        return ["grammar" in (await pool.ask(REQUEST, owner)).value for _ in range(20 * (owner + 1))]

    asked = asyncio.gather(*map(ask_often, range(num_callers)))
    assert all(map(all, await asyncio.wait_for(asked, 10)))


async def test_a_request_that_is_dropped_at_its_cancellation_fails_no_other() -> None:
    """The cancelled call has not run yet, and its request is still in the queue, when a request drops it."""
    pool = WorkerPool(WORKER, 1, 30.0, max_queued_bytes=10)
    try:
        busy = asyncio.create_task(pool.ask(REQUEST, "busy"))
        cancelled = asyncio.create_task(pool.ask(REQUEST, "cancelled", 9))
        await asyncio.sleep(0)
        cancelled.cancel()
        async with asyncio.timeout(30):
            reply = await pool.ask(REQUEST, "next", 5)
        assert "grammar" in reply.value
        assert "grammar" in (await busy).value
    finally:
        pool.close()
