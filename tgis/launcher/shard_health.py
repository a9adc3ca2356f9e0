"""Serves the HTTP endpoints of a node without a router: `/health` and `/metrics` report whether its shards
serve."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.config.processes import LauncherConfig
from tgis.net.http.server import METRICS_TYPE, health_routes, serve_http
from tgis.net.tls import port_certificates

READY = """\
# HELP tgi_ready 1 while this node's shards serve; 0: loading, waiting for other nodes, or ending
# TYPE tgi_ready gauge
tgi_ready {}
"""


@asynccontextmanager
async def serve_health(config: LauncherConfig, is_serving: Callable[[], bool]) -> AsyncIterator[None]:
    """Serve the endpoints within the context, with TLS if `http_tls` is set.

    Raises PortError and CertificateError."""

    async def metrics(request: Request) -> Response:
        return Response(READY.format(int(is_serving())), media_type=METRICS_TYPE)

    app = Starlette(routes=[*health_routes(is_serving), Route("/metrics", metrics)])
    certificates = port_certificates(config)
    watching = asyncio.create_task(certificates.watch()) if certificates else None
    try:
        async with serve_http(app, config, certificates):
            yield
    finally:
        if watching is not None:
            watching.cancel()
