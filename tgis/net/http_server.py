"""The server of the HTTP port.

It aborts connections with an incomplete request or an unread answer after a while. When there are too many
connections, it aborts the oldest."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tgis.config.network import PortOptions
from tgis.net.ports import listen
from tgis.net.tls import Certificates

REQUEST_S = 10.0  # from the first byte, or from connecting, until the answer is sent
MAX_CONNECTIONS = 128  # probes and scrapes need a few; the gRPC port needs the file descriptors more
MAX_HEADER_BYTES = 16 << 10
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `/metrics`


class HttpConnection(H11Protocol):
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened_at = self.loop.time()
        self._begin()
        if len(self.connections) > MAX_CONNECTIONS:
            min(self.connections, key=attrgetter("_opened_at")).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begin()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._finish()
        super().on_response_complete()  # handles the next request if it has arrived
        if self.transport.get_write_buffer_size() or not self.cycle.response_complete:
            self._begin()

    def _begin(self) -> None:
        if self._end is None:
            self._end = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _finish(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


@asynccontextmanager
async def serve_http(app: Any, options: PortOptions, certificates: Certificates | None) -> AsyncIterator[int]:
    """Serve `app` within the context and yield the port. Raises PortError.

    The port uses TLS only with `http_tls`. Clients need no certificate."""
    listener = listen(options.bind, options.port)
    server = _server(app, certificates if options.http_tls else None)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def _server(app: Any, certificates: Certificates | None) -> uvicorn.Server:
    settings = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    if certificates is not None:
        settings.load()
        settings.ssl = certificates.renewing_context()
    return uvicorn.Server(settings)


def health_routes(is_ready: Callable[[], bool]) -> list[Route]:
    async def health(request: Request) -> Response:
        return Response() if is_ready() else JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    return [Route("/health", health), Route("/live", live)]
