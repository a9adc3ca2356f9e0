"""Serves HTTP ports, whose connections have the limits of their routes."""

import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tgis.config.network import PortOptions
from tgis.net.http.connection_limits import ConnectionOptions
from tgis.net.http.routes import PROBE_LIMITS, RouteLimits
from tgis.net.http.uvicorn_internals import run_server
from tgis.net.ports import listen
from tgis.net.tls import Certificates

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `/metrics`


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
    limits = ConnectionOptions(
        fresh or PROBE_LIMITS, options.slow_reader_timeout, options.keepalive_time, max_age_s
    )
    async with run_server(app, listener, limits, context):
        yield listener.getsockname()[1]


def health_routes(is_ready: Callable[[], bool]) -> list[Route]:
    async def health(request: Request) -> Response:
        return Response() if is_ready() else JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    return [Route("/health", health), Route("/live", live)]
