"""HTTP ports of a router in this process, without an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from tests.support.router.load import load_reports
from tgis.config.processes import RouterConfig
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.serving.ports import HttpPorts
from tgis.router.api.openai.errors import OPENAI_ERRORS
from tgis.router.api.openai.pages import page_routes
from tgis.router.api.openai.rules import OPENAI
from tgis.router.api.port_resources import PortResources
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.metrics.scrape import render_process

HTTP, API = "http", "api"


def api_on(config: RouterConfig) -> HttpApi:
    return HttpApi(
        OPENAI,
        (),
        OPENAI_ERRORS,
        prefix="/v1/",
        is_served=bool(config.http_api),
        pages=partial(page_routes, config),
    )


@asynccontextmanager
async def open_ports(api: str | None = "openai", **options: Any) -> AsyncIterator[dict[str, int]]:
    """Yield the HTTP port, and the API's port if it has its own."""
    config = RouterConfig(tokenizer_path="", bind="127.0.0.1", port=0, http_api=api, **options)
    metrics, apis = Metrics(MetricLimits(9, 9, 9)), [api_on(config)]
    tokens = BearerTokens(config.auth_tokens_path) if config.auth_tokens_path else None
    resources = PortResources(metrics, MemoryRelease(), load_reports(metrics), tokens=tokens)
    ports = HttpPorts(config, resources, apis, lambda: True, render_process(metrics))
    async with ports.serve() as port, ports.serve_api() as api_port:
        yield {HTTP: port} if api_port is None else {HTTP: port, API: api_port}
