"""Connections of random bytes: each ends, none gets 500 or a line in the log, and others are served."""

import asyncio
import random
import re

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.router import http_fuzz
from tgis.config.processes import RouterConfig
from tgis.net.http.server import serve_http

CONFIG = RouterConfig(tokenizer_path="", bind="127.0.0.1", port=0, slow_reader_timeout=5.0)
END_S = 20.0  # for a connection to end after its client has sent everything
TOGETHER = 20
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
STEADY = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def send(port: int, data: bytes, r: random.Random) -> list[int]:
    """Return the statuses of the responses after the server has ended the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in http_fuzz.cuts(r, data):
            writer.write(part)
            await asyncio.sleep(0)
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(-1), END_S)
    except OSError:  # the server has ended the connection
        received = b""
    finally:
        writer.close()
    return [int(status) for status in STATUS.findall(received)]


async def ask_steadily(port: int, stop: asyncio.Event) -> int:
    num_answers = 0
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STEADY)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        num_answers += 1
        await asyncio.sleep(0.01)
    return num_answers


@pytest.mark.parametrize(
    "count", [500, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_any_bytes_get_an_answer_or_an_end(count: int, caplog: pytest.LogCaptureFixture) -> None:
    r, statuses, stop = random.Random(count), set[int](), asyncio.Event()
    routes = [Route("/echo", echo, methods=["GET", "POST"])]
    async with serve_http(Starlette(routes=routes), CONFIG, None) as port:
        steady = asyncio.create_task(ask_steadily(port, stop))
        for _ in range(0, count, TOGETHER):
            sent = [send(port, http_fuzz.connection(r), r) for _ in range(TOGETHER)]
            for answered in await asyncio.gather(*sent):
                statuses.update(answered)
        stop.set()
        assert await steady > 10
    assert {200, 400, 404} <= statuses
    assert not {status for status in statuses if status >= 500 and status != 503}
    # asyncio's lines come from this test's own writers to ended connections.
    assert not [record for record in caplog.records if record.name != "asyncio" or record.exc_info]
