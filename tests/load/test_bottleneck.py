"""Whether a load process says that it is the bottleneck, with servers faster and slower than it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tgis.load.apis.interface import LoadTarget
from tgis.load.figures import summarize_level
from tgis.load.job import LoadJob
from tgis.load.processes import LoadProcesses
from tgis.load.workload.conversations import TokenScale, Workload

NUM_STREAMS = 8
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
EVENT = f"data: {json.dumps({'choices': [{'text': 'a'}]})}\n\n".encode()
MODELS = b'HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n{"data":[{"id": "m"}]}'


@asynccontextmanager
async def streaming(num_tokens: int, pause_s: float) -> AsyncIterator[str]:
    """Serve streams of events, which have a pause after each, or follow each other at once."""
    last = {
        "choices": [{"text": "", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens},
    }
    end = f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(MODELS)
        elif pause_s:
            writer.write(HEAD)
            for _ in range(num_tokens):
                writer.write(EVENT)
                await asyncio.sleep(pause_s)
            writer.write(end)
        else:
            writer.write(HEAD + EVENT * num_tokens + end)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def find_bottleneck(num_tokens: int, pause_s: float) -> str | None:
    async with streaming(num_tokens, pause_s) as address, LoadProcesses(1) as processes:
        job = LoadJob(
            api="completions",
            target=LoadTarget(address=address),
            workload=Workload(texts=("a",), output_tokens=str(num_tokens)),
            scale=TokenScale(),
            first_index=0,
            step=1,
            warm_up=0,
            concurrency=NUM_STREAMS,
            num_conversations=NUM_STREAMS,
        )
        run = await processes.run([job], lambda _: None)
    assert [record.error for record in run.records] == [None] * NUM_STREAMS
    assert {record.output_tokens for record in run.records} == {num_tokens}
    bottleneck: str | None = summarize_level([run], None, {})["generator"]["bottleneck"]
    return bottleneck


@pytest.mark.slow
async def test_a_server_faster_than_the_generator_is_noticed() -> None:
    assert await find_bottleneck(20_000, 0.0) is not None


@pytest.mark.slow
async def test_a_server_slower_than_the_generator_is_the_limit_itself() -> None:
    reason = await find_bottleneck(50, 0.02)
    assert reason is None or "of a core" not in reason, "another program of a busy machine may delay it"
