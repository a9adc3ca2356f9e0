"""Responses of an HTTP port to arbitrary bytes: on real sockets, with a client of plain asyncio."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tgis.config.processes import RouterConfig
from tgis.net.http import connection_limits, uvicorn_internals
from tgis.net.http import routes as http_routes
from tgis.net.http.pending_input import MAX_HEADER_BYTES
from tgis.net.http.routes import LimitedRoute, RouteLimits
from tgis.net.http.server import serve_http
from tgis.net.http.slow_readers import SlowReadError

pytestmark = pytest.mark.usefixtures("steady_clock")

SHORT_S = 0.2
CONFIG = RouterConfig(tokenizer_path="", bind="127.0.0.1", port=0, slow_reader_timeout=SHORT_S)
DATA_SEGMENTS = 152  # offset in the kernel's `struct tcp_info`


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_internals, "LINGER_S", SHORT_S / 4)


Connect = Callable[[], "asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]"]


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("full", 503)(scope, receive, send)


API = RouteLimits(None, 2, request_s=SHORT_S, idle_s=SHORT_S, refuse=refuse)
SLOW = API._replace(request_s=50 * SHORT_S, idle_s=5.0)


class App:
    """App that returns what its requests received."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.has_begun, self.has_ended = asyncio.Event(), asyncio.Event()
        routes = [
            Route("/plain", self.echo, methods=["GET", "POST"]),
            LimitedRoute("/api", self.echo, API, methods=["POST"]),
            LimitedRoute("/wait", self.wait, API),
            LimitedRoute("/upload", self.echo, SLOW, methods=["POST"]),
            LimitedRoute("/late", self.wait, SLOW),
            LimitedRoute("/flood", self.flood, API),
            LimitedRoute("/parts", self.parts, API),
            LimitedRoute("/early", self.early, SLOW, methods=["POST"]),
            LimitedRoute("/begin", self.begin, SLOW, methods=["POST"]),
        ]
        self.starlette = Starlette(routes=routes)

    async def echo(self, request: Request) -> Response:
        return Response(await request.body())

    async def wait(self, request: Request) -> Response:
        self.has_begun.set()
        try:
            await asyncio.sleep(3 * SHORT_S)
        except BaseException as error:
            self._end(error)
            raise
        return Response(b"late")

    async def parts(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"part"

        return StreamingResponse(parts())

    async def early(self, request: Request) -> Response:
        return Response(b"early")

    async def begin(self, request: Request) -> Response:
        """Begin the response before the end of the request."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begin", "more_body": True})
            await send({"type": "http.response.body", "body": await request.body()})

        return _Answering(answer)

    async def flood(self, request: Request) -> Response:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                while True:
                    await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                    await asyncio.sleep(0)
            except BaseException as error:
                self._end(error)
                raise

        return _Answering(answer)

    def _end(self, error: BaseException) -> None:
        self.ends.append(type(error).__name__)
        self.has_ended.set()


class _Answering(Response):
    def __init__(self, answer: Callable[[Scope, Receive, Send], object]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)  # type: ignore[misc]


@asynccontextmanager
async def serving(max_age_s: float | None = None) -> AsyncIterator[tuple[App, Connect]]:
    app = App()
    writers = []
    async with serve_http(app.starlette, CONFIG, None, max_age_s=max_age_s) as port:

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return reader, writer

        try:
            yield app, connect  # type: ignore[misc]
        finally:
            for writer in writers:
                writer.close()


def request(path: str, body: bytes = b"", method: str = "POST", headers: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body
    )


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await head_of(reader)
    if b"transfer-encoding: chunked" in head:
        return int(head.split()[1]), await reader.readuntil(b"0\r\n\r\n")
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(size)


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """Read the head of a response in lower case; its body follows."""
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).lower()


async def end_of(reader: asyncio.StreamReader) -> bytes | None:
    """Read the rest; None if the connection was reset."""
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionResetError:
        return None


@pytest.mark.parametrize("name", [b"X-Long: ", b""], ids=["one value", "many headers"])
@pytest.mark.parametrize("num_pieces", [1, 40])
async def test_a_long_header_gets_431(name: bytes, num_pieces: int) -> None:
    """Also a header that never ends."""
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(b"GET /plain HTTP/1.1\r\n" + name)
        line = b"a" * 1024 if name else b"X-A: b\r\n" * 128
        for _ in range(num_pieces):
            writer.write(line * (1 if num_pieces > 1 else 20))
            await asyncio.sleep(0)
        if num_pieces == 1:
            writer.write(b"\r\n\r\n")
        assert (await answer_of(reader))[0] == 431
        assert await end_of(reader) == b""


async def test_a_header_below_the_limit_is_served() -> None:
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(request("/plain", b"x", headers=f"X-Long: {'a' * (MAX_HEADER_BYTES - 200)}\r\n"))
        assert await answer_of(reader) == (200, b"x")


async def test_trailers_and_the_framing_of_chunks_have_a_limit() -> None:
    head = b"POST /plain HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    for tail in (b"0\r\nX-Trailer: ", b"1;"):
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(head + tail + b"a" * (MAX_HEADER_BYTES + 1024))
            assert (await answer_of(reader))[0] == 431


async def test_a_body_must_arrive_in_time_but_its_answer_may_be_late() -> None:
    async with serving() as (_, connect):
        loop = asyncio.get_running_loop()
        reader, writer = await connect()
        began = loop.time()
        writer.write(request("/api", b"12345")[:-2])
        assert not await end_of(reader)
        assert 0.5 * SHORT_S < loop.time() - began < 3 * SHORT_S
        reader, writer = await connect()
        writer.write(request("/wait", method="GET"))
        assert await answer_of(reader) == (200, b"late")


async def test_a_body_must_arrive_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has sent more has more time for the rest."""
    monkeypatch.setattr(http_routes, "FIRST_S", SHORT_S / 2)
    monkeypatch.setattr(http_routes, "MIN_RATE", 10_000)
    async with serving() as (_, connect):
        loop = asyncio.get_running_loop()
        for num_bytes, least, maximum in ((0, 0.4, 2.5), (6_000, 3.2, 8)):
            reader, writer = await connect()
            began = loop.time()
            writer.write(request("/upload", bytes(20_000))[: num_bytes - 20_000])
            assert not await end_of(reader)
            assert least * SHORT_S < loop.time() - began < maximum * SHORT_S


async def test_requests_that_arrive_slowly_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest slow request gives way if there is no room; new ones are refused as before."""
    async with serving() as (app, connect):
        halves = [await connect() for _ in range(2)]
        for _, writer in halves:
            writer.write(request("/upload", b"12345")[:-2])
            await asyncio.sleep(0.02)
        reader, writer = await connect()
        writer.write(request("/upload", b"x"))
        assert await answer_of(reader) == (503, b"full")
        monkeypatch.setattr(connection_limits, "PATIENCE_S", 0.0)
        running, writer = await connect()
        writer.write(request("/late", method="GET"))
        assert await answer_of(halves[0][0]) == (408, b"Request Timeout")
        assert await end_of(halves[0][0]) == b""
        halves[1][1].write(b"45")
        assert await answer_of(halves[1][0]) == (200, b"12345")
        halves[1][1].write(request("/late", method="GET"))
        await asyncio.sleep(0.02)
        reader, writer = await connect()
        writer.write(request("/upload", b"x"))
        assert await answer_of(reader) == (503, b"full")
        assert [await answer_of(each) for each in (running, halves[1][0])] == [(200, b"late")] * 2
        assert not app.ends


@pytest.mark.parametrize(
    "text",
    [b"nonsense\r\n\r\n", b"GET http://a HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
)
async def test_invalid_http_gets_400_and_no_log_line(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(text)
            assert (await answer_of(reader))[0] == 400
            assert await end_of(reader) == b""
    assert not caplog.records


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", ["a"], 200),
        ("1.1", [""], 200),
        ("1.1", ["a_b.example:3000 "], 200),
        ("1.1", ["[fe80::1%25eth0]:80"], 200),
        ("1.1", [], 400),
        ("1.1", ["a", "a"], 400),
        ("1.1", ["a, b"], 400),
        ("1.1", ["a/b"], 400),
        ("1.1", ["evil.example@a"], 400),
        ("1.1", ["a:b"], 400),
        ("1.1", ["\N{CYRILLIC SMALL LETTER A}"], 400),
        ("1.0", [], 200),
        ("1.0", ["a", "b"], 400),
    ],
    ids=str,
)
async def test_requests_have_one_valid_host(version: str, hosts: list[str], status: int) -> None:
    lines = [f"GET /plain HTTP/{version}", *(f"Host: {host}" for host in hosts), "", ""]
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write("\r\n".join(lines).encode())
        assert (await answer_of(reader))[0] == status


async def test_a_request_for_another_protocol_is_answered_in_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    with caplog.at_level(logging.WARNING):
        async with serving() as (_, connect):
            reader, writer = await connect()
            for body in (b"one", b"two"):
                writer.write(request("/plain", body, headers=upgrade))
                assert await answer_of(reader) == (200, body)
    assert not caplog.records


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    """Also requests that arrive together, and in chunks."""
    chunked = (
        b"POST /api HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\nX-T: x\r\n\r\n"
    )
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(request("/wait", method="GET") + chunked + request("/plain", b"three"))
        assert [await answer_of(reader) for _ in range(3)] == [(200, b"late"), (200, b"two"), (200, b"three")]
        writer.write(request("/api", b"four"))
        assert await answer_of(reader) == (200, b"four")


async def test_an_idle_connection_closes_gracefully() -> None:
    async with serving() as (_, connect):
        reader, writer = await connect()
        for _ in range(3):
            writer.write(request("/api", b"x"))
            assert await answer_of(reader) == (200, b"x")
            await asyncio.sleep(SHORT_S / 2)
        began = asyncio.get_running_loop().time()
        assert await end_of(reader) == b""
        assert asyncio.get_running_loop().time() - began < 2 * SHORT_S


async def test_of_too_many_requests_of_an_api_the_newest_is_refused() -> None:
    """Idle connections do not count, and probes are not affected."""
    async with serving() as (app, connect):
        idle = [await connect() for _ in range(2)]
        for reader, writer in idle:
            writer.write(request("/api", b"x"))
            await answer_of(reader)
        running = [await connect() for _ in range(2)]
        for _, writer in running:
            writer.write(request("/wait", method="GET"))
        await app.has_begun.wait()
        await asyncio.sleep(0.02)
        reader, writer = await connect()
        writer.write(request("/api", b"x"))
        assert await answer_of(reader) == (503, b"full")
        writer.write(request("/plain", b"probe"))
        assert await answer_of(reader) == (200, b"probe")
        assert [await answer_of(reader) for reader, _ in running] == [(200, b"late")] * 2
        writer.write(request("/api", b"x"))
        assert await answer_of(reader) == (200, b"x")


async def test_of_too_many_idle_connections_the_oldest_closes_gracefully() -> None:
    async with serving() as (_, connect):
        began = asyncio.get_running_loop().time()
        all_ = [await connect() for _ in range(3)]
        for reader, writer in all_:
            writer.write(request("/upload", b"x"))
            await answer_of(reader)
        assert await end_of(all_[0][0]) == b""
        assert asyncio.get_running_loop().time() - began < SLOW.idle_s
        all_[2][1].write(request("/api", b"y"))
        assert await answer_of(all_[2][0]) == (200, b"y")


@pytest.mark.parametrize("end", ["close", "half-close", "reset", "garbage"])
async def test_a_client_that_goes_cancels_its_request(end: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving() as (app, connect):
            _, writer = await connect()
            writer.write(request("/wait", method="GET"))
            await app.has_begun.wait()
            if end == "close":
                writer.close()
            elif end == "half-close":
                writer.write_eof()
            elif end == "reset":
                writer.transport.abort()
            else:
                writer.write(b"nonsense\r\n\r\n")
            await asyncio.wait_for(app.has_ended.wait(), SHORT_S)
            assert app.ends == ["CancelledError"]
    assert not caplog.records


async def test_a_client_that_does_not_read_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving() as (app, connect):
            reader, writer = await connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request("/flood", method="GET"))
            await asyncio.wait_for(app.has_ended.wait(), 10 * SHORT_S)
            assert app.ends == [SlowReadError.__name__]
            await asyncio.sleep(SHORT_S / 4)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1 << 30)
    assert not caplog.records


async def test_joint_writes_share_tcp_segments() -> None:
    """Twenty parts and their frames are one TCP segment, as the client's kernel counts them."""
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(request("/parts", method="GET"))
        assert (await answer_of(reader))[1].count(b"part") == 20
        info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        assert struct.unpack_from("I", info, DATA_SEGMENTS)[0] <= 3


OLD_S, YOUNG_S = 0.0, 3600.0
CLOSE = b"connection: close\r\n"


async def test_an_old_connection_ends_with_its_next_answer() -> None:
    """Also a whole stream; the client is informed before."""
    async with serving(OLD_S) as (_, connect):
        for path, end in (("/plain", b""), ("/parts", b"0\r\n\r\n")):
            reader, writer = await connect()
            writer.write(request(path, method="GET"))
            assert CLOSE in await head_of(reader)
            rest = await end_of(reader)
            assert rest is not None
            assert rest.endswith(end)


async def test_an_old_connection_answers_no_request_after_its_last_answer() -> None:
    async with serving(OLD_S) as (_, connect):
        reader, writer = await connect()
        writer.write(request("/wait", method="GET") + request("/plain", b"two"))
        assert CLOSE in await head_of(reader)
        assert await end_of(reader) == b"late"


@pytest.mark.parametrize("age_s", [YOUNG_S, None])
async def test_a_young_connection_goes_on(age_s: float | None) -> None:
    async with serving(age_s) as (_, connect):
        reader, writer = await connect()
        for _ in range(3):
            writer.write(request("/plain", b"x"))
            assert CLOSE not in await head_of(reader)
            assert await reader.readexactly(1) == b"x"


@pytest.mark.parametrize(("path", "begin"), [("/early", b"early"), ("/begin", b"5\r\nbegin\r\n")])
async def test_an_answer_that_begins_before_its_request_ends_is_not_the_last(path: str, begin: bytes) -> None:
    """A connection that is closed with unread bytes is reset, and its client might not read the response."""
    async with serving(OLD_S) as (_, connect):
        reader, writer = await connect()
        whole = request(path, b"body")
        writer.write(whole[:-2])
        assert CLOSE not in await head_of(reader)
        assert await reader.readexactly(len(begin)) == begin
        writer.write(whole[-2:])
        if path == "/begin":
            assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\nbody\r\n0\r\n\r\n"
        writer.write(request("/plain", b"x"))
        assert CLOSE in await head_of(reader)
        assert await end_of(reader) == b"x"


@pytest.mark.parametrize(
    ("path", "body"), [("/plain", b"body"), ("/parts", b"part" * 20), ("/upload", b"")], ids=str
)
async def test_answers_to_http_1_0_have_no_chunks(path: str, body: bytes) -> None:
    """Such headers do not keep the connection open."""
    method, sent = ("GET", b"") if path == "/parts" else ("POST", body)
    asked = request(path, sent, method, "Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(asked)
        head = await head_of(reader)
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert await end_of(reader) == body
