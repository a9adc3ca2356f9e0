"""What the HTTP port of a node without a router answers: `/live`, `/health` while its shards serve, and
`/metrics` with that alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tgis.certificates import port_certificates
from tgis.config import LauncherConfig
from tgis.http_port import http_server
from tgis.ports import listen

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
READY = """\
# HELP tgi_ready 1 while this node's shards serve; 0: loading, waiting for other nodes, or ending
# TYPE tgi_ready gauge
tgi_ready {}
"""


@asynccontextmanager
async def serve_health(config: LauncherConfig, is_serving: Callable[[], bool]) -> AsyncIterator[None]:
    """Meanwhile, encrypted where a router's would be. Raises PortError and CertificateError."""

    async def health(request: Request) -> Response:
        return Response() if is_serving() else JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        return Response(READY.format(int(is_serving())), media_type=METRICS_TYPE)

    listener = listen(config.bind, config.port)
    app = Starlette(routes=[Route("/health", health), Route("/live", live), Route("/metrics", metrics)])
    server = http_server(app, port_certificates(config) if config.http_tls else None)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield
    finally:
        server.should_exit = True
        await task
