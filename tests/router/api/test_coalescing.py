"""Tests the tokens in a message over real sockets. A client that reads late gets several tokens in a message.
A client that reads at once gets each token before the next one is computed."""

import asyncio
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.router.engine_pair import Scene
from tests.support.router.http2 import ACK, END_STREAM, INITIAL_WINDOW_SIZE, Connection, Kind, frame
from tests.support.router.http_port import metric
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.router.scripted_chats import scripted_chats
from tests.support.router.served_chats import HELLO
from tests.support.router.served_grpc import open_grpc
from tests.support.router.served_http import MODEL, ServedHttp
from tests.support.router.served_inputs import open_inputs
from tests.support.router.served_tgi import until
from tgis.pb import generation_pb2 as pb
from tgis.router.chat.formats.registry import ChatFormats

LENGTH = 100
NUM_LONG = 1500
STREAM = "/fmaas.GenerationService/GenerateStream"
LIMIT_S = 20.0
WINDOW = 64


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("late"), 1)
    setup.stub.Generate(batch("a"))
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def messages_of(data: bytes) -> Iterator[pb.GenerationResponse]:
    while data:
        _, length = struct.unpack("!BI", data[:5])
        yield pb.GenerationResponse.FromString(data[5 : 5 + length])
        data = data[5 + length :]


def test_late_readers_get_several_tokens_in_a_message(router: Setup) -> None:
    """A client with a window of a few bytes gets little but the header until all tokens are generated."""
    details = pb.ResponseOptions(generated_tokens=True)
    request = single("girl", stopping=stopping(LENGTH, min_new_tokens=LENGTH), response=details)
    before = router.shards[0].num_steps
    with Connection("127.0.0.1", router.service.grpc_port, [(INITIAL_WINDOW_SIZE, WINDOW)]) as connection:
        connection.send(frame(Kind.SETTINGS, flags=ACK))
        connection.call(1, STREAM, request.SerializeToString())
        data = b"".join(each.payload for each in connection.frames(0.2) if each.kind == Kind.DATA)
        assert len(data) <= WINDOW
        deadline = time.monotonic() + LIMIT_S
        while router.shards[0].num_steps < before + LENGTH or metric(router, "tgi_requests_live"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        connection.send(frame(Kind.WINDOW_UPDATE, struct.pack("!I", 1 << 20), stream=1))
        for each in connection.frames(LIMIT_S):
            if each.kind == Kind.DATA:
                data += each.payload
            if each.kind == Kind.HEADERS and each.flags & END_STREAM:
                break
    header, *parts = messages_of(data)
    assert header.input_token_count > 0
    params = {"stopping": request.params.stopping, "response": details}
    [whole] = router.stub.Generate(batch("girl", **params)).responses
    assert [token for part in parts for token in part.tokens] == list(whole.tokens)
    assert "".join(part.text for part in parts) == whole.text
    assert max(len(part.tokens) for part in parts) > 10
    assert len(parts) < LENGTH / 2
    assert parts[-1].stop_reason == pb.MAX_TOKENS


def read_late(served: ServedHttp, body: Any, may_read: threading.Event) -> bytes:
    """Wait until reading is allowed, then read an answer with a small buffer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]), timeout=60)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.connect((connection.host, connection.port))
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    may_read.wait(LIMIT_S)
    data = connection.getresponse().read()
    connection.close()
    return data


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_late_http_readers_get_coalesced_events(n: int, tmp_path: Path) -> None:
    """The answer has megabytes, more than the sockets of both ends hold."""
    async with scripted_chats(tmp_path, ChatFormats()) as chats:
        ids = chats.script("b a " * NUM_LONG, ends=False)[:NUM_LONG]
        body = {"messages": HELLO, "max_tokens": NUM_LONG, "stream": True, "logprobs": True, "n": n}
        body |= {"top_logprobs": 5, "return_token_ids": True}
        may_read = threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(read_late, chats.served, body, may_read))
        await until(lambda: chats.served.scene.metrics.resource_counts["request"].created == n)
        await until(lambda: "request" not in chats.served.scene.left())
        may_read.set()
        *frames, _ = (await reading).removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
    choices = [json.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames]
    for index in range(n):
        sizes = [choice.get("token_ids") or [] for choice in choices if choice["index"] == index]
        assert [token_id for some in sizes for token_id in some] == ids
        assert max(map(len, sizes)) > 10
        contents = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
        assert sum(map(len, contents)) == n * NUM_LONG


class Steps:
    """Steps of the shard. The test permits each step."""

    def __init__(self, scene: Scene) -> None:
        self._permits = threading.Semaphore(0)
        self._execute = scene.shard.model.execute
        scene.shard.model.execute = self._wait  # type: ignore[method-assign]

    def permit(self, count: int = 1) -> None:
        self._permits.release(count)

    def _wait(self, request: Any) -> Any:
        assert self._permits.acquire(timeout=LIMIT_S)
        return self._execute(request)


async def test_prompt_readers_get_each_token_at_once(tmp_path: Path) -> None:
    async with open_grpc(tmp_path) as served, asyncio.timeout(2 * LIMIT_S):
        steps = Steps(served.scene)
        details = pb.ResponseOptions(generated_tokens=True)
        limits = stopping(LENGTH, min_new_tokens=LENGTH)
        parts = aiter(served.stub.GenerateStream(single("girl", stopping=limits, response=details)))
        await anext(parts)
        for number in range(1, LENGTH + 1):
            steps.permit()
            part = await anext(parts)
            assert (part.generated_token_count, len(part.tokens)) == (number, 1)
        steps.permit(9)
        assert [part async for part in parts] == []


async def test_over_http_each_token_comes_at_once_too(tmp_path: Path) -> None:
    async with open_inputs(tmp_path, "openai") as served, asyncio.timeout(2 * LIMIT_S):
        steps = Steps(served.scene)
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{served.url}/v1", max_retries=0) as client:
            extra = {"return_token_ids": True, "ignore_eos": True}
            stream = await client.completions.create(
                model=MODEL, prompt="girl", max_tokens=LENGTH, temperature=0, stream=True, extra_body=extra
            )
            parts = aiter(stream)
            await anext(parts)
            for _ in range(LENGTH):
                steps.permit()
                (choice,) = (await anext(parts)).choices
                assert len(choice.token_ids) == 1  # type: ignore[attr-defined]
            steps.permit(9)
            assert [part async for part in parts] == []
