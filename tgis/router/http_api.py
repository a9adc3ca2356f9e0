"""The HTTP port: `/health` (ready to serve), `/live` (the process answers) and `/metrics`."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
