"""Limits of routes on the time and number of connections of the HTTP port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tgis.config.option import LARGEST
from tgis.config.processes import RouterConfig
from tgis.net.http import uvicorn_internals
from tgis.net.http.routes import LimitedRoute, RouteLimits
from tgis.net.http.server import serve_http

pytestmark = pytest.mark.usefixtures("steady_clock")

LIMIT_S = 0.2
FEW = RouteLimits(LIMIT_S, 2)
CONFIG = RouterConfig(tokenizer_path="", bind="127.0.0.1", port=0)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer_late(request: Request) -> Response:
    await asyncio.sleep(2 * LIMIT_S)
    return Response("late")


async def stream_for_long(request: Request) -> Response:
    async def parts() -> AsyncIterator[str]:
        for _ in range(8):
            await asyncio.sleep(LIMIT_S / 2)
            yield "part"

    return StreamingResponse(parts())


ROUTES = [
    Route("/usual", answer_late),
    LimitedRoute("/endless", stream_for_long, RouteLimits(None, 2)),
    LimitedRoute("/generous", answer_late, RouteLimits(20 * LIMIT_S, 2), methods=["POST"]),
    LimitedRoute("/strict", answer_late, RouteLimits(LIMIT_S / 2, 2)),
]


@pytest.fixture(autouse=True)
def _usual_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_internals, "PROBE_LIMITS", FEW)


@asynccontextmanager
async def connect(
    port: int, head: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nHost: a\r\n\r\n".encode() if head else b"")
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(port: int, head: str) -> bytes:
    """Return the body of a response; empty if the connection was aborted."""
    async with connect(port, head) as (reader, _):
        try:
            text = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in text:
                return await reader.readuntil(b"0\r\n\r\n")
            return await reader.readexactly(4)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return b""


async def test_a_route_says_how_long_its_answer_may_take() -> None:
    async with serve_http(Starlette(routes=ROUTES), CONFIG, None, FEW) as port:
        heads = ("GET /usual", "POST /generous", "GET /strict", "GET /endless", "GET /nothing")
        usual, generous, strict, endless, nothing = await asyncio.gather(
            *(ask(port, f"{head} HTTP/1.1") for head in heads)
        )
    assert (usual, generous, strict) == (b"", b"late", b"")
    assert endless.count(b"part") == 8
    assert nothing == b"Not "


async def test_the_next_request_of_a_connection_has_limits_of_its_own() -> None:
    async with serve_http(Starlette(routes=ROUTES), CONFIG, None, FEW) as port:
        async with connect(port, "POST /generous HTTP/1.1") as (reader, writer):
            await reader.readuntil(b"late")
            writer.write(b"GET /usual HTTP/1.1\r\nHost: a\r\n\r\n")
            began = asyncio.get_running_loop().time()
            assert not await reader_ends(reader)
            assert asyncio.get_running_loop().time() - began < 1.8 * LIMIT_S


async def reader_ends(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_connections_are_counted_by_the_limits_of_their_routes() -> None:
    """Of three connections of one route, the oldest is aborted, and no other."""
    async with serve_http(Starlette(routes=ROUTES), CONFIG, None, FEW) as port:
        streams = [asyncio.create_task(ask(port, "GET /endless HTTP/1.1"))]
        late = [asyncio.create_task(ask(port, "POST /generous HTTP/1.1"))]
        for tasks, head in ((streams, "GET /endless"), (late, "POST /generous"), (streams, "GET /endless")):
            await asyncio.sleep(LIMIT_S / 8)
            tasks.append(asyncio.create_task(ask(port, f"{head} HTTP/1.1")))
        assert await asyncio.gather(*late) == [b"late", b"late"]
        counts = [body.count(b"part") for body in await asyncio.gather(*streams)]
        assert counts == [0, 8, 8]


async def test_of_too_many_connections_without_a_request_the_oldest_goes() -> None:
    async with serve_http(Starlette(routes=ROUTES), CONFIG, None, FEW) as port:
        late = asyncio.create_task(ask(port, "POST /generous HTTP/1.1"))
        await asyncio.sleep(LIMIT_S / 8)
        async with connect(port) as (first, _), connect(port), connect(port):
            assert await asyncio.wait_for(reader_ends(first), LIMIT_S / 2) == b""
        assert await late == b"late"


async def test_the_longest_times_fit() -> None:
    longest = replace(CONFIG, keepalive_time=float(LARGEST), slow_reader_timeout=float(LARGEST))
    async with serve_http(Starlette(routes=ROUTES), longest, None, FEW, max_age_s=float(LARGEST)) as port:
        head = "POST /generous HTTP/1.1\r\ncontent-length: 0"
        async with connect(port, head) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
