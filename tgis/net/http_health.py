"""The routes of every HTTP port: `/health` (ready to serve) and `/live` (the process answers)."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `/metrics`


def health_routes(is_ready: Callable[[], bool]) -> list[Route]:
    async def health(request: Request) -> Response:
        return Response() if is_ready() else JSONResponse({"error": "unhealthy"}, status_code=503)

    async def live(request: Request) -> Response:
        return Response()

    return [Route("/health", health), Route("/live", live)]
