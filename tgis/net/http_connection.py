"""Implements a connection to an HTTP port, with limits on time, size and the number of connections."""

import asyncio
import logging
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tgis.log_limits import KIND
from tgis.net.answer import Answer, send_for_version
from tgis.net.connection_groups import ConnectionGroups, Group, add_member, has_room
from tgis.net.http_routes import PROBE_LIMITS, LimitedApp, RouteLimits, find_route, has_path
from tgis.net.joined_writes import JoinedWrites
from tgis.net.pending_input import PendingInput
from tgis.net.ports import watch_peer
from tgis.net.slow_readers import Flow, SlowReadError
from tgis.net.tls import client_name

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
MAX_FRAMING = 8  # maximum framing bytes per byte of a chunked body
MAX_QUEUED = 4  # requests of a connection that wait for the current response
MAX_PIECES = 8  # parsed in one iteration of the event loop
MAX_LENGTH_DIGITS = 19
LINGER_S = 1.0  # time for a refused client to read the response before the connection closes


class ServerConfig(uvicorn.Config):
    """Configuration and groups of a port's connections."""

    fresh = PROBE_LIMITS
    """Limits of connections without a complete request."""
    slow_reader_s = 60.0
    keepalive_s = 60.0
    max_age_s: float | None = None
    """Age after which a connection ends with its next response; None: never."""

    def __init__(self, app: Starlette) -> None:
        self.routes: Iterable[BaseRoute] = app.routes
        self.groups = ConnectionGroups()
        super().__init__(
            app,
            http=HttpConnection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
        )


class _Refusal(Exception):
    """Raised by the parser's callbacks to refuse a request."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class _Running(NamedTuple):
    cycle: RequestResponseCycle
    task: asyncio.Task[None]


class HttpConnection(HttpToolsProtocol):
    config: ServerConfig
    transport: JoinedWrites
    flow: Flow

    _timer: asyncio.TimerHandle | None = None
    _deadline: float | None = None
    _slow_timer: asyncio.TimerHandle | None = None
    _began_at: float | None = None
    """Time of the first byte of the current request; None: the connection is idle."""
    _is_whole = True  # False while a request is arriving
    _num_received = 0  # bytes since the last complete request
    _num_body = 0  # those of them that belong to a body
    _num_body_left = 0  # unparsed bytes of a body with a length
    _num_unparsed = 0  # body bytes that the parser skips, in a request to upgrade the protocol
    _will_parse = False  # True if the rest of the input will be parsed in a later iteration
    _input: PendingInput
    _running: _Running | None = None
    _has_been_refused = False
    _group: Group | None = None
    _certificate_name = ""
    _old_at = math.inf  # time after which the connection ends with its next response

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        watch_peer(transport, self.config.keepalive_s)
        super().connection_made(JoinedWrites(transport, self.loop))
        self.flow = Flow(self.transport, self._parse_soon)
        self._input = PendingInput()
        self._certificate_name = client_name(transport.get_extra_info("ssl_object"))
        self._began_at = self.loop.time()
        if self.config.max_age_s is not None:
            self._old_at = self._began_at + self.config.max_age_s
        self._enter(self.config.fresh)
        self._reschedule()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave_group()
        self._began_at = None
        self._reschedule()
        self._stop_slow_timer()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._end_running()

    def eof_received(self) -> None:
        self._input.clear()
        self.transport.flush()
        self._end_running()
        self._start_slow_timer()

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
        except _Refusal as refusal:
            self._refuse(refusal.status)
        self.flow.hold_reading(bool(self._input))
        self._reschedule()

    def _parse_piece(self) -> None:
        """Parse the next piece of the input. Raises _Refusal."""
        if self._began_at is None:
            self._began_at = self.loop.time()
        piece = self._input.take(self._num_unparsed or self._num_body_left)
        self._num_received += len(piece)
        if self._num_unparsed:
            self._take_unparsed(piece)
            return
        self._num_body_left -= min(len(piece), self._num_body_left)
        self._feed(piece)
        if self._num_received - self._num_body > MAX_HEADER_BYTES + MAX_FRAMING * self._num_body:
            raise _Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _feed(self, piece: bytes) -> None:
        """Pass a piece to the parser. Raises _Refusal."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._input.give_back(len(piece) - upgrade.args[0])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Refusal):
                raise error.__context__ from None
            logger.error("a request cannot be parsed", exc_info=error, extra={KIND: "HTTP unreadable"})
            raise _Refusal(HTTPStatus.BAD_REQUEST) from None
        except httptools.HttpParserError:
            raise _Refusal(HTTPStatus.BAD_REQUEST) from None

    def _take_unparsed(self, body: bytes) -> None:
        """Process a part of the body of a request to upgrade the protocol, which the parser skips."""
        self._num_unparsed -= len(body)
        self.on_body(body)
        if not self._num_unparsed:
            self._complete_message()

    def _refuse(self, status: HTTPStatus) -> None:
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

    def _linger(self) -> None:
        """Close soon: a connection closed with unread bytes is reset, and its client reads no response."""
        self._began_at = None
        self._has_been_refused = True
        self._input.clear()
        self.flow.hold_reading(has_backlog=False)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.timeout_keep_alive_handler)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_whole = False
        self._num_body_left = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if "method" in self.scope:
            return  # trailers are ignored
        super().on_header(name, value)
        if self.headers[-1][0] == b"content-length":
            self._num_body_left = _read_length(value)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            raise _Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if not has_path(self.url):
            raise _Refusal(HTTPStatus.BAD_REQUEST)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            if b"transfer-encoding" in dict(self.headers):
                raise _Refusal(HTTPStatus.BAD_REQUEST)
            self._num_unparsed = self._num_body_left
        if not self._num_unparsed:
            self._complete_message()

    def _complete_message(self) -> None:
        # A response that has begun can no longer announce that it is the last one, and a response sent before
        # the end of its request may be lost if the connection closes.
        if self.loop.time() >= self._old_at and not self.cycle.response_started:
            self.cycle.keep_alive = False
        super().on_message_complete()
        self._is_whole = True
        self._num_received = self._num_body = self._num_body_left = 0
        if self._running is None:  # the response ended before the request
            self._become_idle()

    # Requests and responses.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        route = find_route(self.config.routes, cycle.scope)
        limits = PROBE_LIMITS if route is None else route.limits
        if isinstance(route, LimitedApp):
            app = route.handle  # bypasses Starlette's middleware, which would process each part of a stream
        group = self.config.groups.find(limits)
        if limits.refuse is not None and not has_room(group, limits, self.loop.time()):
            app, limits = limits.refuse, self.config.fresh
        self._enter(limits)
        state: dict[str, Any] = cycle.scope["state"]
        state["answer"] = Answer(cycle)
        state["certificate_name"] = self._certificate_name
        task = self.loop.create_task(self._run(cycle, app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._running = _Running(cycle, task)

    async def _run(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send_for_version(cycle, send))
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
            running, self._running = self._running, None
            running.cycle.disconnected = True
            running.cycle.message_event.set()
            running.task.cancel()

    def on_response_complete(self) -> None:
        running, self._running = self._running, None
        self.timeout_keep_alive = self._limits.idle_s  # type: ignore[assignment]
        if self.transport.is_closing():
            self._start_slow_timer()
        super().on_response_complete()  # starts the next request if it has arrived
        self._parse_soon()
        if self._running is not None or (running is not None and not running.cycle.more_body):
            self._began_at = self.loop.time()
        elif self.expect_100_continue:
            self._linger()  # the client may or may not send the body
        if self._running is None and self._is_whole and not self.transport.is_closing():
            self._become_idle()
        self._reschedule()

    def _become_idle(self) -> None:
        self._began_at = None
        self._enter(self._limits if self._limits.refuse is not None else self.config.fresh, is_idle=True)
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.idle_s, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        self._start_slow_timer()
        super().timeout_keep_alive_handler()

    # Groups of connections.

    def _enter(self, limits: RouteLimits, is_idle: bool = False) -> None:
        """Move the connection to the group of these limits."""
        group = self.config.groups.find(limits, is_idle)
        self._limits = limits
        if group is not self._group:
            self.leave_group()
            self._group = group
            add_member(group, self, limits, self.loop)

    def leave_group(self) -> None:
        if self._group is not None:
            self._group.pop(self, None)
            self._group = None

    def end(self, is_graceful: bool) -> None:
        self.timeout_keep_alive_handler() if is_graceful else self.transport.abort()

    def arrives_since(self) -> float | None:
        running = self._running
        return self._began_at if running is None or running.cycle.more_body else None

    def give_way(self) -> None:
        self._enter(self.config.fresh)
        self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        self._reschedule()

    # Timers.

    def _reschedule(self) -> None:
        deadline = self._next_deadline()
        if deadline == self._deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = deadline
        self._timer = None if deadline is None else self.loop.call_at(deadline, self.transport.abort)

    def _next_deadline(self) -> float | None:
        if self._began_at is None:
            return None
        is_arriving = self.arrives_since() is not None
        arrival_s = self._limits.arrival_s(self._num_received) if is_arriving else None
        spans = (self._limits.answer_s, arrival_s)
        return min((self._began_at + span for span in spans if span is not None), default=None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_slow_timer()

    def resume_writing(self) -> None:
        if not self.flow.is_slow:
            self._stop_slow_timer()
            super().resume_writing()

    def _start_slow_timer(self) -> None:
        if self._slow_timer is None:
            self._slow_timer = self.loop.call_later(self.config.slow_reader_s, self._give_up)

    def _stop_slow_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _give_up(self) -> None:
        """End the request of a client that does not read, and abort the connection."""
        if self._running is None:
            self.transport.abort()
        else:
            self.flow.give_up()


def _read_length(value: bytes) -> int:
    """Return the value of a Content-Length header. Raises _Refusal if it is not a number."""
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise _Refusal(HTTPStatus.BAD_REQUEST)
    return int(value)
