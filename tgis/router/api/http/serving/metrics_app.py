"""Serves `/health` (ready to serve), `/live` (the process answers) and `/metrics`."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.net.http.server import METRICS_TYPE, health_routes
from tgis.router.metrics.scrape import Render

SPACING_S = 0.05  # minimum time between two renderings of the metrics; each takes milliseconds


def metrics_routes(is_ready: Callable[[], bool], render: Render) -> list[Route]:
    scrapes = _Scrapes(render)

    async def scrape(request: Request) -> Response:
        return Response(await scrapes.text(), media_type=METRICS_TYPE)

    return [*health_routes(is_ready), Route("/metrics", scrape)]


class _Scrapes:
    """Scrapes that share one text, rendered after they arrive. Any number of them leaves the loop free."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._next: asyncio.Task[bytes] | None = None
        self._rendering = asyncio.Lock()
        self._written_at = float("-inf")

    async def text(self) -> bytes:
        if self._next is None:
            self._next = asyncio.create_task(self._write())
        return await asyncio.shield(self._next)

    async def _write(self) -> bytes:
        clock = asyncio.get_running_loop().time
        async with self._rendering:
            await asyncio.sleep(max(self._written_at + SPACING_S - clock(), 0.0))
            self._next = None  # scrapes that arrive from now on need a later text
            try:
                return await self._render()
            finally:
                self._written_at = clock()
