"""The HTTP port: `/health` (ready to serve), `/live` (the process answers) and `/metrics`; in the clear, or
with TLS for clients that need no certificate of their own."""

import ssl
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tgis.certificates import Certificates
from tgis.router.metrics import Metrics

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def http_app(is_ready: Callable[[], bool], metrics: Metrics) -> Starlette:
    async def health(request: Request) -> Response:
        if is_ready():
            return Response()
        return JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), media_type=METRICS_TYPE)

    return Starlette(routes=[Route("/health", health), Route("/live", live), Route("/metrics", scrape)])


def encrypt(settings: uvicorn.Config, certificates: Certificates) -> None:
    """With what the files hold when a handshake begins."""

    def renew(connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        certificates.look()
        connection.context = certificates.context

    settings.load()
    settings.ssl = certificates.context
    settings.ssl.sni_callback = renew  # asked for before every handshake, whether a name is given or not
