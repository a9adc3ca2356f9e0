"""Tests OpenAI's own client, sync and async, with calls that are refused as overload or abandoned."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.router.engine_pair import NUM_PLACES
from tests.support.router.model_of_shard import Row
from tests.support.router.served_chats import open_chats
from tests.support.router.served_http import MODEL, ServedHttp

STEP_S = 0.2
LONG: Any = {"model": MODEL, "max_tokens": 100, "extra_body": {"ignore_eos": True}}
SHORT: Any = {"model": MODEL, "prompt": "a", "max_tokens": 2}

ServedGrpc = tuple[ServedHttp, openai.AsyncOpenAI, openai.OpenAI]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedGrpc]:
    async with open_chats(tmp_path) as (served, client):
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sync_client:
            yield served, client, sync_client


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def row_of(served: ServedHttp, word: str) -> Row | None:
    """Return the shard's row whose prompt contains the word."""
    decode = served.tokenizer.fast.decode
    rows = served.scene.shard.model.rows.values()
    return next((row for row in rows if word in decode(row.token_ids[: row.prompt_len])), None)


async def test_calls_that_find_no_room_are_refused_and_tried_again(served: ServedGrpc) -> None:
    scene, client, sync_client = served[0].scene, served[1], served[2]
    scene.shard.step_s = STEP_S
    crowd = await client.completions.create(prompt=["a girl"] * NUM_PLACES, stream=True, **LONG)
    create: Any = sync_client.completions.create
    refused: list[Callable[[], Awaitable[Any]]] = [
        lambda: client.completions.create(**SHORT),
        lambda: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], stream=True
        ),
        lambda: asyncio.to_thread(create, **SHORT),
        lambda: asyncio.to_thread(create, stream=True, **SHORT),
    ]
    for ask in refused:
        with pytest.raises(openai.RateLimitError) as caught:
            await ask()
        assert (caught.value.status_code, caught.value.type) == (429, "rate_limit_error")
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.body["message"] == "Model is overloaded"  # type: ignore[index]
    assert scene.metrics.request_failure.values()["conc_limit",] == len(refused)

    began = time.monotonic()
    again: Any = sync_client.with_options(max_retries=1).completions.create
    retried = asyncio.create_task(asyncio.to_thread(again, **SHORT))
    await wait_for(lambda: scene.metrics.request_failure.values()["conc_limit",] == len(refused) + 1)
    await crowd.close()
    scene.shard.step_s = 0.001
    assert (await retried).choices[0].finish_reason == "length"
    assert time.monotonic() - began > 0.95, "the client waits as long as retry-after says"


async def test_abandoned_calls_end_at_the_shard_within_a_step(served: ServedGrpc) -> None:
    """Streams are closed, a task is cancelled and a timeout expires while another call goes on."""
    served_http, client, sync_client = served
    scene = served_http.scene
    scene.shard.step_s = STEP_S

    async def close_stream() -> None:
        messages: Any = [{"role": "user", "content": "fox"}]
        stream = await client.chat.completions.create(messages=messages, stream=True, **LONG)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()

    async def cancel_task() -> None:
        task = asyncio.create_task(client.completions.create(prompt="bread", **LONG))
        await wait_for(lambda: row_of(served_http, "bread"))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def close_sync_stream() -> None:
        with sync_client.completions.create(prompt="time", stream=True, **LONG) as stream:
            next(iter(stream))

    def run_out_of_time() -> None:
        hurried = sync_client.with_options(timeout=5 * STEP_S)  # the row exists after one or two steps
        with pytest.raises(openai.APITimeoutError):
            hurried.completions.create(prompt="dog", **LONG)

    async def leave(word: str, way: Awaitable[None]) -> tuple[Row, int]:
        """Return the call's row and its number of tokens when its client left."""
        task = asyncio.ensure_future(way)
        await wait_for(lambda: row_of(served_http, word))
        row = row_of(served_http, word)
        assert row is not None
        await task
        return row, len(row.token_ids)

    beside = asyncio.create_task(client.completions.create(prompt="once upon", **LONG))
    left = await asyncio.gather(
        leave("fox", close_stream()),
        leave("bread", cancel_task()),
        leave("time", asyncio.to_thread(close_sync_stream)),
        leave("dog", asyncio.to_thread(run_out_of_time)),
    )
    await wait_for(lambda: len(scene.shard.model.rows) == 1)
    for row, num_tokens in left:
        assert len(row.token_ids) <= num_tokens + 2, "one was computed, and one may have been sent"
    scene.shard.step_s = 0.001
    usage = (await beside).usage
    assert usage is not None
    assert usage.completion_tokens == LONG["max_tokens"]
    assert scene.metrics.request_failure.values()["cancelled",] == len(left)
