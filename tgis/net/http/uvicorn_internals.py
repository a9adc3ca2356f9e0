"""Serves an HTTP port with uvicorn's private classes. No other file may use them.

Checked with uvicorn 0.54.0. None of its public settings limits the time in which a request arrives, the time
that a response waits for its reader, or the number of requests that a connection queues; docs/architecture.md
compares servers. Private parts in use:

- `HttpToolsProtocol`: callbacks are overridden; attributes of the connection and of its newest request.
- `RequestResponseCycle`: the state of a response, which is read and set while the app sends it.
- `Server`: `capture_signals` is overridden; `server_state.connections`.

If a version changes these, requests fail or have no limits. tests/net/http/test_uvicorn_internals.py
says what has changed. Compare this file with a new version before pyproject.toml permits it."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tgis.log_limits import KIND
from tgis.net.http.answer import Answer
from tgis.net.http.connection_limits import ConnectionGroups, ConnectionLimits, ConnectionOptions
from tgis.net.http.joined_writes import JoinedWrites
from tgis.net.http.pending_input import PendingInput, RefusedRequestError, RequestSize
from tgis.net.http.request_head import check_head
from tgis.net.http.routes import PROBE_LIMITS, LimitedApp, find_route
from tgis.net.http.slow_readers import Flow, SlowReadError
from tgis.net.ports import watch_peer
from tgis.net.tls import client_name

logger = logging.getLogger(__name__)

MAX_QUEUED = 4  # requests of a connection that wait for the current response
MAX_PIECES = 8  # parsed in one iteration of the event loop
LINGER_S = 1.0  # time for a refused client to read the response before the connection closes
LAST_ANSWERS_S = 10.0  # time limit for responses that are still being sent when a port closes


class _Config(uvicorn.Config):
    def __init__(self, app: Starlette, options: ConnectionOptions, context: ssl.SSLContext | None) -> None:
        self.routes: Iterable[BaseRoute] = app.routes
        self.groups = ConnectionGroups()
        self.options = options
        super().__init__(
            app,
            http=HttpConnection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ssl_context_factory=None if context is None else lambda config, default: context,
        )


class _Server(uvicorn.Server):
    capture_signals = contextlib.nullcontext  # type: ignore[assignment]  # the process handles its signals


@asynccontextmanager
async def run_server(
    app: Starlette, listener: socket.socket, options: ConnectionOptions, context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Serve `app` within the context on a listening socket, with TLS if there is a context for it."""
    server = _Server(_Config(app, options, context))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait((task,), timeout=LAST_ANSWERS_S)
        for connection in list(server.server_state.connections):
            assert isinstance(connection, HttpConnection)
            connection.abort()
        await task


class _Running(NamedTuple):
    cycle: RequestResponseCycle
    task: asyncio.Task[None]


class HttpConnection(HttpToolsProtocol):
    """Connection whose input is limited in size, and whose time and number ConnectionLimits limits."""

    config: _Config
    transport: JoinedWrites
    flow: Flow  # type: ignore[assignment]

    _limits: ConnectionLimits
    _input: PendingInput
    _size: RequestSize
    _is_whole = True  # False while a request is arriving
    _is_unparsed = (
        False  # True if the parser skips the rest of the body, in a request to upgrade the protocol
    )
    _will_parse = False  # True if the rest of the input will be parsed in a later iteration
    _running: _Running | None = None
    _has_been_refused = False
    _certificate_name = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        watch_peer(transport, self.config.options.keepalive_s)
        super().connection_made(JoinedWrites(transport, self.loop))
        self.flow = Flow(self.transport, self._parse_soon)
        self._input = PendingInput()
        self._size = RequestSize()
        self._certificate_name = client_name(transport.get_extra_info("ssl_object"))
        self._limits = ConnectionLimits(self, self.config.groups, self.config.options, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.close()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._end_running()

    def eof_received(self) -> None:
        self._input.clear()
        self.transport.flush()
        self._end_running()
        self._limits.start_slow_timer()

    def data_received(self, data: bytes) -> None:
        if self._has_been_refused:
            return
        self._unset_keepalive_if_required()
        self._input.add(data)
        self._parse()

    def _parse_soon(self) -> None:
        """Continue to parse after the event loop has served other connections."""
        if self._input and not self._will_parse:
            self._will_parse = True
            self.loop.call_soon(self._parse)

    def _parse(self) -> None:
        """Parse the input, except for requests beyond MAX_QUEUED."""
        self._will_parse = False
        try:
            for _ in range(MAX_PIECES):
                if not self._input or self.transport.is_closing() or len(self.pipeline) >= MAX_QUEUED:
                    break
                self._parse_piece()
            else:
                self._parse_soon()
        except RefusedRequestError as refusal:
            self.refuse(refusal.status)
        self.flow.hold_reading(bool(self._input))
        self._limits.reschedule()

    def _parse_piece(self) -> None:
        """Parse the next piece of the input. Raises RefusedRequestError."""
        self._limits.receive()
        piece = self._input.take(self._size.num_body_left)
        self._size.count_received(len(piece))
        if self._is_unparsed:
            self.on_body(piece)
            if not self._size.num_body_left:
                self._complete_message()
        else:
            self._feed(piece)
            self._size.check_framing()

    def _feed(self, piece: bytes) -> None:
        """Pass a piece to the parser. Raises RefusedRequestError."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._input.give_back(len(piece) - upgrade.args[0])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, RefusedRequestError):
                raise error.__context__ from None
            logger.error("a request cannot be parsed", exc_info=error, extra={KIND: "HTTP unreadable"})
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST) from None
        except httptools.HttpParserError:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST) from None

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_whole = False
        self._size.begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if "method" in self.scope:
            return  # trailers are ignored
        super().on_header(name, value)
        if self.headers[-1][0] == b"content-length":
            self._size.read_length(value)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_http_version(), self.url, self.headers)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._size.count_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            if b"transfer-encoding" in dict(self.headers):
                raise RefusedRequestError(HTTPStatus.BAD_REQUEST)
            self._is_unparsed = self._size.num_body_left > 0
        if not self._is_unparsed:
            self._complete_message()

    def _complete_message(self) -> None:
        # A response that has begun can no longer announce that it is the last one, and a response sent before
        # the end of its request may be lost if the connection closes.
        if self._limits.is_old and not self.cycle.response_started:
            self.cycle.keep_alive = False
        super().on_message_complete()
        self._is_whole = True
        self._is_unparsed = False
        self._size.end()
        if self._running is None:  # the response ended before the request
            self._become_idle()

    # Requests and responses.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        route = find_route(self.config.routes, cycle.scope)
        limits = PROBE_LIMITS if route is None else route.limits
        if isinstance(route, LimitedApp):
            app = route.handle  # bypasses Starlette's middleware, which would process each part of a stream
        if not self._limits.admit(limits):
            app = limits.refuse
        cycle.default_headers = list(cycle.default_headers)
        state: dict[str, Any] = cycle.scope["state"]
        state["answer"] = Answer(cycle.default_headers, lambda: cycle.response_started)
        state["certificate_name"] = self._certificate_name
        task = self.loop.create_task(self._run(cycle, app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._running = _Running(cycle, task)

    async def _run(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, _send_for_version(cycle, send))
            except SlowReadError:
                cycle.disconnected = True
            except asyncio.CancelledError:
                if not cycle.disconnected:
                    raise

        await cycle.run_asgi(guarded)  # type: ignore[arg-type]
        if self.flow.is_slow:
            self.transport.abort()

    def _end_running(self) -> None:
        """Cancel the current request, because its client has left."""
        if self._running is not None:
            running = self._running
            self._running = None
            running.cycle.disconnected = True
            running.cycle.message_event.set()
            running.task.cancel()

    def on_response_complete(self) -> None:
        running = self._running
        self._running = None
        self.timeout_keep_alive = self._limits.route.idle_s  # type: ignore[assignment]
        if self.transport.is_closing():
            self._limits.start_slow_timer()
        super().on_response_complete()  # starts the next request if it has arrived
        self._parse_soon()
        if self._running is not None or (running is not None and not running.cycle.more_body):
            self._limits.begin()
        elif self.expect_100_continue:
            self._linger()  # the client may or may not send the body
        if self._running is None and self._is_whole and not self.transport.is_closing():
            self._become_idle()
        self._limits.reschedule()

    def _become_idle(self) -> None:
        self._limits.become_idle()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self._limits.route.idle_s, self.close)

    def _linger(self) -> None:
        """Close soon: a connection closed with unread bytes is reset, and its client reads no response."""
        self._limits.linger()
        self._has_been_refused = True
        self._input.clear()
        self.flow.hold_reading(has_backlog=False)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limits.start_slow_timer()

    def resume_writing(self) -> None:
        if not self.flow.is_slow:
            self._limits.stop_slow_timer()
            super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._limits.start_slow_timer()
        super().timeout_keep_alive_handler()

    # What ConnectionLimits calls.

    @property
    def is_arriving(self) -> bool:
        return self._running is None or self._running.cycle.more_body

    @property
    def num_received(self) -> int:
        return self._size.num_received

    def abort(self) -> None:
        self.transport.abort()

    def close(self) -> None:
        self.timeout_keep_alive_handler()

    def refuse(self, status: HTTPStatus) -> None:
        """Respond with an error, drop the rest of the request and close the connection."""
        self._has_been_refused = True
        self._input.clear()
        if self.pipeline or (self._running is not None and self._running.cycle.response_started):
            self.transport.abort()
            return
        self._end_running()
        text = status.phrase.encode()
        head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(text) + text)
        self._linger()

    def give_up(self) -> None:
        if self._running is None:
            self.transport.abort()
        else:
            self.flow.give_up()


def _send_for_version(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` that does not use chunked encoding for an HTTP/1.0 client.

    The end of the connection then ends a body without a length."""
    if cycle.scope["http_version"] != "1.0":
        return send
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
