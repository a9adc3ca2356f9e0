"""The server of the HTTP port. It aborts connections that take too long and, of too many, the oldest."""

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
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened_at = self.loop.time()
        self._start_timer()
        if len(self.connections) > MAX_CONNECTIONS:
            min(self.connections, key=attrgetter("_opened_at")).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._start_timer()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._stop_timer()
        super().on_response_complete()  # handles the next request if it has arrived
        if self.transport.get_write_buffer_size() or not self.cycle.response_complete:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@asynccontextmanager
async def serve_http(app: Any, options: PortOptions, certificates: Certificates | None) -> AsyncIterator[int]:
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
