"""Serves HTTP ports, whose connections have the limits of their routes."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tgis.config.network import PortOptions
from tgis.net.http_connection import HttpConnection, ServerConfig
from tgis.net.http_routes import RouteLimits
from tgis.net.ports import listen
from tgis.net.tls import Certificates

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `/metrics`
LAST_ANSWERS_S = 10.0  # time limit for responses that are still being sent when a port closes


@asynccontextmanager
async def serve_http(
    app: Starlette,
    options: PortOptions,
    certificates: Certificates | None,
    fresh: RouteLimits | None = None,
    is_shared: bool = False,
    max_age_s: float | None = None,
) -> AsyncIterator[int]:
    """Serve `app` within the context on the HTTP port, with TLS if `http_tls` is set, and yield the port.

    `fresh` are the limits of connections without a request. Connections older than `max_age_s` end with their
    next response. With `is_shared`, other processes may share the port. Raises PortError."""
    listener = listen(options.bind, options.port, is_shared)
    context = certificates.renewing_context() if certificates is not None and options.http_tls else None
    async with serve_listener(app, listener, options, context, fresh, max_age_s) as port:
        yield port


@asynccontextmanager
async def serve_listener(
    app: Starlette,
    listener: socket.socket,
    options: PortOptions,
    context: ssl.SSLContext | None,
    fresh: RouteLimits | None = None,
    max_age_s: float | None = None,
) -> AsyncIterator[int]:
    """Serve `app` within the context on a listening socket, and yield its port."""
    config = ServerConfig(app)
    config.slow_reader_s = options.slow_reader_timeout
    config.keepalive_s = options.keepalive_time
    config.max_age_s = max_age_s
    if fresh is not None:
        config.fresh = fresh
    config.load()
    config.ssl = context
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait((task,), timeout=LAST_ANSWERS_S)
        for connection in list(server.server_state.connections):
            assert isinstance(connection, HttpConnection)
            connection.transport.abort()
        await task


def health_routes(is_ready: Callable[[], bool]) -> list[Route]:
    async def health(request: Request) -> Response:
        return Response() if is_ready() else JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    return [Route("/health", health), Route("/live", live)]
