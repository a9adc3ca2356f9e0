"""Opens the router's HTTP ports: probes and metrics, and the APIs on the same port or on their own."""

import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.routing import Route

from tgis.config.processes import RouterConfig
from tgis.net.http.routes import PROBE_LIMITS, LimitedApp, LimitedRoute, RouteLimits
from tgis.net.http.server import serve_http, serve_listener
from tgis.net.ports import reserve
from tgis.router.api.http.http_api import HttpApi, find_api
from tgis.router.api.http.serving.answer_accounts import AnswerAccounts
from tgis.router.api.http.serving.app import ApiGate, Phase, absent_api_routes, api_route, starlette_of
from tgis.router.api.http.serving.load_header import LoadHeader
from tgis.router.api.http.serving.metrics_app import metrics_routes
from tgis.router.api.open_files import share_files
from tgis.router.api.port_resources import PortResources
from tgis.router.metrics.scrape import Render

logger = logging.getLogger(__name__)

CUT_S = 1.0  # time limit for the last events of aborted requests


class HttpPorts:
    def __init__(
        self,
        config: RouterConfig,
        resources: PortResources,
        apis: Sequence[HttpApi],
        is_ready: Callable[[], bool],
        render: Render,
    ) -> None:
        """Build the ASGI applications. `apis` includes APIs that are not served. `render` returns the text of
        a scrape."""
        self._config = config
        self._certificates = resources.certificates
        self._served = [api for api in apis if api.is_served]
        self._gate: ApiGate | None = None
        if self._served:
            failures = resources.metrics.request_failure
            self._gate = ApiGate(self._served, config, failures, resources.memory, resources.tokens)
            answers = AnswerAccounts(self._gate, self._served, resources.metrics)
            self._api = LoadHeader(answers, resources.load_reports)
        self._api_limits = _api_limits(config) if self._gate else PROBE_LIMITS
        self._probes = [*(route for api in self._served for route in api.probes)]
        serves_apis = self._gate is not None and config.http_api_port is None
        api_routes = self._api_routes() if serves_apis else []
        pages = self._pages(apis, serves_apis)
        absent = [api for api in reversed(apis) if not serves_apis or api not in self._served]
        routes = [*pages, *api_routes, *metrics_routes(is_ready, render), *absent_api_routes(absent)]
        self._app = starlette_of(routes)
        self._reserved: socket.socket | None = None

    def serve(self) -> AbstractAsyncContextManager[int]:
        """Serve the HTTP port within the context, and yield it. Raises PortError."""
        config = self._config
        if config.http_api_port is not None:
            self._reserved = reserve(config.bind, config.http_api_port, config.shares_ports)
        limits = self._api_limits if config.http_api_port is None else PROBE_LIMITS
        return serve_http(
            self._app, config, self._certificates, limits, config.shares_ports, config.connection_age
        )

    @asynccontextmanager
    async def serve_api(self) -> AsyncIterator[int | None]:
        """Admit calls to the APIs within the context. Yield the APIs' own port, or None if they have none."""
        if not self._gate:
            yield None
            return
        self._gate.phase = Phase.OPEN
        if self._reserved is None:
            yield None
            return
        config, certificates = self._config, self._certificates
        self._reserved.listen(socket.SOMAXCONN)
        context = certificates.client_port_context() if certificates is not None else None
        app = starlette_of([*self._pages(self._served, serves_apis=True), *self._api_routes()])
        async with serve_listener(
            app, self._reserved, config, context, self._api_limits, config.connection_age
        ) as port:
            yield port

    def _pages(self, apis: Sequence[HttpApi], serves_apis: bool) -> list[LimitedRoute]:
        """Return the routes of a port's pages. A port that serves the APIs has no pages on their paths."""
        pages = [page for api in apis for page in api.pages(serves_apis and api in self._served)]
        return [page for page in pages if not serves_apis or find_api(self._served, page.path) is None]

    def _api_routes(self) -> list[Route | LimitedApp]:
        config = self._config
        is_alone = config.http_api_port is not None
        return [*self._probes, api_route(self._api, self._served, config, is_alone)]

    async def stop(self, timeout_s: float) -> None:
        """Refuse new calls, and abort the remaining ones after the time limit."""
        if not self._gate:
            return
        self._gate.phase = Phase.DRAINING
        await self._gate.wait(timeout_s)
        self._gate.cut()
        await self._gate.wait(CUT_S)

    def cut(self) -> None:
        if self._gate:
            self._gate.cut()


def _api_limits(config: RouterConfig) -> RouteLimits:
    """Return the limits of connections without a request on the APIs' port."""
    shares = share_files(config)
    if shares.num_missing:
        logger.warning(
            "the process may open %d files too few for --max-http-connections %d; "
            "raise its limit of open files, or lower the flag",
            shares.num_missing,
            config.max_http_connections,
        )
    return PROBE_LIMITS._replace(max_connections=shares.http_fresh)
