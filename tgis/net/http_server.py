"""The server of the HTTP port. It aborts connections that take too long and, of too many, the oldest. Routes
say what is too long and too many for their requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tgis.config.network import PortOptions
from tgis.net.ports import listen
from tgis.net.tls import Certificates

MAX_HEADER_BYTES = 16 << 10
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `/metrics`


class RouteLimits(NamedTuple):
    """Limits of the connections that have a request for a route. They are counted together where several
    routes have the same object."""

    answer_s: float | None
    """Time from a request's first byte until its answer is sent; None: unlimited."""
    max_connections: int


PROBE_LIMITS = RouteLimits(answer_s=10.0, max_connections=128)
"""Limits of connections without a whole request, and of usual routes. Probes and scrapes need a few
connections; the gRPC port needs the file descriptors more."""


class LimitedRoute(Route):
    """Route whose requests have limits of their own."""

    def __init__(self, path: str, endpoint: Callable[..., Any], limits: RouteLimits, **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        self.limits = limits


class HttpConnection(H11Protocol):
    _timer: asyncio.TimerHandle | None = None
    _limits = PROBE_LIMITS
    _followed: object = None
    """The request whose limits apply."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened_at = self.loop.time()
        self._start_timer()
        self._abort_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._start_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and self.cycle is not self._followed:
            self._followed = self.cycle
            assert isinstance(self.config.app, Starlette)
            self._limit(_limits_of(self.config.app.routes, self.scope))

    def on_response_complete(self) -> None:
        self._stop_timer()
        self._limit(PROBE_LIMITS)
        super().on_response_complete()  # handles the next request if it has arrived
        if self.transport.get_write_buffer_size() or not self.cycle.response_complete:
            self._start_timer()

    def _limit(self, limits: RouteLimits) -> None:
        if limits is self._limits:
            return
        self._limits = limits
        if self._timer is not None:
            self._stop_timer()
            self._start_timer_at(self._began_at)
        self._abort_oldest()

    def _abort_oldest(self) -> None:
        others = (each for each in self.connections if isinstance(each, HttpConnection))
        alike = [each for each in others if each._limits is self._limits]
        if len(alike) > self._limits.max_connections:
            min(alike, key=attrgetter("_opened_at")).transport.abort()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._start_timer_at(self.loop.time())

    def _start_timer_at(self, began_at: float) -> None:
        self._began_at, answer_s = began_at, self._limits.answer_s
        if answer_s is not None:
            self._timer = self.loop.call_at(began_at + answer_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _limits_of(routes: Iterable[BaseRoute], scope: Any) -> RouteLimits:
    for route in routes:
        if isinstance(route, LimitedRoute) and route.matches(scope)[0] is not Match.NONE:
            return route.limits
    return PROBE_LIMITS


@asynccontextmanager
async def serve_http(
    app: Starlette, options: PortOptions, certificates: Certificates | None
) -> AsyncIterator[int]:
    """Serve `app` within the context, with TLS if `http_tls`, and yield the port. Raises PortError."""
    listener = listen(options.bind, options.port)
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    if certificates is not None and options.http_tls:
        config.load()
        config.ssl = certificates.renewing_context()
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def health_routes(is_ready: Callable[[], bool]) -> list[Route]:
    async def health(request: Request) -> Response:
        return Response() if is_ready() else JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    return [Route("/health", health), Route("/live", live)]
