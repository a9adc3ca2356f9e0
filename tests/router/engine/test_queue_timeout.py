"""Checks `--max-queue-time`: through the engine, and through both kinds of APIs, with rows that a long text
occupies."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from google.rpc import error_details_pb2, status_pb2

from tests.support.http_exchange import exchange
from tests.support.router.engine_pair import Scene, each_of, open_scene
from tests.support.router.messages import single, stopping
from tests.support.router.served_grpc import open_grpc, status_of
from tests.support.router.served_http import open_http
from tgis.router.engine.handle import ClaimId, SequenceId, SequenceSpec
from tgis.router.events import Ended, Event, TimedOut
from tgis.router.sequence import Stopping

LIMIT_S = 0.15
ONE_ROW: dict[str, Any] = {"max_batch_size": 1, "max_queue_time": LIMIT_S}
REFUSAL = "the request waited 0.15 s and was not started"


async def begin(scene: Scene, length: int, count: int = 1) -> tuple[ClaimId, list[SequenceId]]:
    spec = SequenceSpec((21, 22, 23), Stopping(length, min_new_tokens=length))
    claim_id = await scene.handle.acquire(count)
    return claim_id, [scene.handle.open(claim_id, spec, None) for _ in range(count)]


async def last_of(scene: Scene, sequence_id: SequenceId) -> Event:
    return [event async for event in each_of(scene.handle.events(sequence_id))][-1]


@asynccontextmanager
async def occupied(scene: Scene) -> AsyncIterator[SequenceId]:
    """Keep the only row occupied within the context, by a text that takes much longer than the limit."""
    scene.shard.step_s = 0.02
    claim_id, [sequence_id] = await begin(scene, 150)
    await anext(each_of(scene.handle.events(sequence_id)))
    yield sequence_id
    scene.handle.release(claim_id)
    for _ in range(100):
        if not scene.left():
            return
        await asyncio.sleep(0.02)


async def test_only_requests_without_a_step_are_refused(tmp_path: Path) -> None:
    async with open_scene(tmp_path, False, **ONE_ROW) as scene:
        async with occupied(scene) as sequence_id:
            claim_id, late = await begin(scene, 1, count=3)
            lasts = await asyncio.gather(*(last_of(scene, each) for each in late))
            assert lasts == [TimedOut(LIMIT_S, is_first=True, is_queued=True)] * 3
            scene.handle.release(claim_id)
            scene.shard.step_s = 0.001
            assert isinstance(await last_of(scene, sequence_id), Ended), "it ran longer than the limit"
        assert not scene.left()
        _, [in_time] = await begin(scene, 1)
        assert isinstance(await last_of(scene, in_time), Ended)


async def test_a_sibling_of_a_running_sequence_is_not_refused(tmp_path: Path) -> None:
    """The second sequence waits until the first one has computed the prompt that both share."""
    async with open_scene(tmp_path, False, max_queue_time=LIMIT_S) as scene:
        scene.shard.step_s = 3 * LIMIT_S
        _, ids = await begin(scene, 1, count=2)
        lasts = await asyncio.gather(*(last_of(scene, each) for each in ids))
        assert all(isinstance(last, Ended) for last in lasts)


@pytest.mark.parametrize("is_split", [False, True])
async def test_the_other_requests_of_a_started_call_are_not_refused(is_split: bool, tmp_path: Path) -> None:
    """A call that fails in part fails as a whole, after it has used the shards."""
    async with open_scene(tmp_path, is_split, **ONE_ROW) as scene:
        scene.shard.step_s = LIMIT_S / 4
        specs = [SequenceSpec((21, 22, number), Stopping(8, min_new_tokens=8)) for number in range(3)]
        claim_id = await scene.handle.acquire(3)
        ids = [scene.handle.open(claim_id, spec, None) for spec in specs]
        lasts = await asyncio.gather(*(last_of(scene, each) for each in ids))
        assert all(isinstance(last, Ended) for last in lasts)


def test_an_idle_service_refuses_nothing(tmp_path: Path) -> None:
    """The router's event loop runs timers first, so that a late turn must start the request itself."""

    async def serve() -> Event:
        async with open_scene(tmp_path, False, **ONE_ROW) as scene:
            _, [first] = await begin(scene, 1)
            assert isinstance(await last_of(scene, first), Ended)
            await asyncio.sleep(0.01)  # nothing else will start the next one
            _, [sequence_id] = await begin(scene, 1)
            time.sleep(2 * LIMIT_S)  # noqa: ASYNC251 (it stands for work of the loop)
            return await last_of(scene, sequence_id)

    assert isinstance(uvloop.run(serve()), Ended)


async def test_over_grpc(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, **ONE_ROW) as served, occupied(served.scene):
        call = served.stub.GenerateStream(single("a", stopping=stopping(1)))
        assert await status_of(call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, REFUSAL)
        trailing = dict(await call.trailing_metadata())
        [detail] = status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details
        retry = error_details_pb2.RetryInfo()
        assert detail.Unpack(retry)
        assert retry.retry_delay.seconds == 1
        assert served.num_failures("queue_timeout") == 1
        assert served.num_failures("conc_limit") == 0


async def test_over_http(tmp_path: Path) -> None:
    async with open_http(tmp_path, **ONE_ROW) as served, occupied(served.scene):
        for stream in (False, True):
            body = {"model": "alias", "prompt": "a", "max_tokens": 1, "stream": stream}
            reply = await asyncio.to_thread(exchange, served.url + "/v1/completions", body)
            assert (reply.status, reply.json["error"]["message"]) == (429, REFUSAL)
            assert reply.headers["retry-after"] == "1"


async def test_a_request_whose_first_token_is_late_at_its_arrival_ends_once(tmp_path: Path) -> None:
    """The engine stands still while the message with the request waits. The limit of the queue ends later."""
    failures = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with open_scene(tmp_path, True, first_token_timeout=LIMIT_S, max_queue_time=3 * LIMIT_S) as scene:
        claim_id, [sequence_id] = await begin(scene, 1)
        time.sleep(2 * LIMIT_S)  # noqa: ASYNC251 - the whole process stands still
        assert await last_of(scene, sequence_id) == TimedOut(LIMIT_S, is_first=True)
        await asyncio.sleep(3 * LIMIT_S)
        scene.handle.release(claim_id)
    assert failures == []
