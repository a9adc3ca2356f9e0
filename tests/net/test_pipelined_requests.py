"""Many requests at once on one connection: responses keep the order, few requests are parsed at a time, and
asyncio's error handler is not called."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.config.processes import RouterConfig
from tgis.net.http.pending_input import MAX_PIECE
from tgis.net.http.server import serve_http
from tgis.net.http.uvicorn_internals import MAX_QUEUED, HttpConnection

CONFIG = RouterConfig(tokenizer_path="", bind="127.0.0.1", port=0, slow_reader_timeout=5.0)
GET = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"
UPGRADE = b"GET /echo HTTP/1.1\r\nhost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
UPGRADE_WITH_BODY = UPGRADE[:-2].replace(b"GET", b"POST") + b"content-length: 5\r\n\r\nabcde"
POST = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nxyz"
CHUNKED = (
    b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n2\r\nyz\r\n0\r\n\r\n"
)
NAMES = ["get", "upgrade", "upgrade with a body", "post", "chunked"]
BODIES = {GET: b"", UPGRADE: b"", UPGRADE_WITH_BODY: b"abcde", POST: b"xyz", CHUNKED: b"xyz"}


class Server:
    def __init__(self, port: int, go_on: asyncio.Event) -> None:
        self.port, self.go_on = port, go_on
        self.num_answered = 0

    async def connect(self, *data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in data:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return reader, writer


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    go_on = asyncio.Event()

    async def echo(request: Request) -> Response:
        server.num_answered += 1
        return Response(await request.body())

    async def wait(request: Request) -> Response:
        await go_on.wait()
        return Response(b"waited")

    routes = [Route("/echo", echo, methods=["GET", "POST"]), Route("/wait", wait)]
    async with serve_http(Starlette(routes=routes), CONFIG, None) as port:
        server = Server(port, go_on)
        yield server


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    return int(head.split()[1]), await reader.readexactly(length)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    caplog.set_level(logging.INFO)
    return caplog.records


@pytest.mark.parametrize("request_bytes", BODIES, ids=NAMES)
@pytest.mark.parametrize("size", [1 << 20, 1000, 7])
async def test_all_are_answered_in_order(
    request_bytes: bytes, size: int, errors: list[logging.LogRecord]
) -> None:
    count = 1000 if size == 1 << 20 else 200
    data = request_bytes * count + GET.replace(b"/echo", b"/none")
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    async with serving() as server:
        reader, writer = await server.connect()
        sending = asyncio.create_task(send(writer, parts))
        for _ in range(count):
            assert await read_answer(reader) == (200, BODIES[request_bytes])
        assert (await read_answer(reader))[0] == 404
        await sending
        writer.close()
    assert not errors


async def send(writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
    for part in parts:
        writer.write(part)
        await writer.drain()


async def test_mixed_kinds_are_answered_in_order(errors: list[logging.LogRecord]) -> None:
    kinds = list(BODIES) * 50
    async with serving() as server:
        reader, writer = await server.connect(b"".join(kinds))
        assert [await read_answer(reader) for _ in kinds] == [(200, BODIES[kind]) for kind in kinds]
        writer.close()
    assert not errors


@pytest.mark.parametrize("kind", BODIES, ids=NAMES)
async def test_few_are_parsed_while_one_is_answered(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parsed = 0
    complete = HttpConnection.on_headers_complete

    def count(self: HttpConnection) -> None:
        nonlocal num_parsed
        num_parsed += 1
        complete(self)

    monkeypatch.setattr(HttpConnection, "on_headers_complete", count)
    async with serving() as server:
        reader, writer = await server.connect(GET.replace(b"/echo", b"/wait"), *[kind * 100] * 50)
        async with asyncio.timeout(60):
            while num_parsed < 2:  # noqa: ASYNC110 - the connection tells nobody
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        # The end of a chunked body is not known before it is parsed.
        max_parsed = MAX_QUEUED + 1 + (MAX_PIECE // len(kind) if kind is CHUNKED else 0)
        assert num_parsed <= max_parsed
        server.go_on.set()
        assert await read_answer(reader) == (200, b"waited")
        for _ in range(5000):
            assert await read_answer(reader) == (200, BODIES[kind])
        writer.close()


@pytest.mark.parametrize("kind", [GET, UPGRADE, CHUNKED])
async def test_others_are_answered_meanwhile(kind: bytes) -> None:
    """The event loop serves other connections after a few requests: a later request on another connection
    gets its response before the last of the first."""
    async with serving() as server:
        other_reader, other_writer = await server.connect()
        reader, writer = await server.connect(kind * 5000)
        await read_answer(reader)
        other_writer.write(GET)
        await read_answer(other_reader)
        assert server.num_answered < 2500
        writer.close()
        other_writer.close()


@pytest.mark.parametrize(
    "line",
    [
        b"content-length: " + b"0" * 5000 + b"1",
        b"content-length: " + b"9" * 5000,
        b"content-length: 1" + b"0" * 30,
        b"content-length: +1",
        b"content-length: \xd9\xa1",
        b"content-length: 1, 1",
        b"content-length: -1",
    ],
    ids=["zeros", "nines", "30 digits", "plus", "other digits", "two", "minus"],
)
@pytest.mark.parametrize("more", [b"", b"connection: upgrade\r\nupgrade: x\r\n"], ids=["plain", "upgrade"])
async def test_lengths_that_are_no_number_get_400(
    line: bytes, more: bytes, errors: list[logging.LogRecord]
) -> None:
    async with serving() as server:
        reader, writer = await server.connect(
            b"POST /echo HTTP/1.1\r\nhost: a\r\n" + more + line + b"\r\n\r\nx"
        )
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
    assert not errors
