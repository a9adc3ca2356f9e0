"""Routes `/health` (ready to serve), `/live` (the process answers) and `/metrics`."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.net.http_server import METRICS_TYPE, health_routes
from tgis.router.metrics.metrics import Metrics

SPACING_S = 0.05  # least time between two renderings of the metrics, each of which takes milliseconds


def metrics_routes(is_ready: Callable[[], bool], metrics: Metrics) -> list[Route]:
    scrapes = _Scrapes(metrics)

    async def scrape(request: Request) -> Response:
        return Response(await scrapes.text(), media_type=METRICS_TYPE)

    return [*health_routes(is_ready), Route("/metrics", scrape)]


class _Scrapes:
    """Scrapes that share a text, rendered after they arrive, so that no number blocks the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._next: asyncio.Future[bytes] | None = None
        self._written_at = float("-inf")

    async def text(self) -> bytes:
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
            loop.call_later(max(self._written_at + SPACING_S - loop.time(), 0.0), self._write)
        return await asyncio.shield(self._next)

    def _write(self) -> None:
        waiting, self._next = self._next, None
        assert waiting is not None, "only who is waited for writes"
        try:
            waiting.set_result(self._metrics.render())
        except Exception as error:
            waiting.set_exception(error)
        self._written_at = asyncio.get_running_loop().time()
