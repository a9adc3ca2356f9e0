"""Answers who opens the address of OpenAI's API in a browser: says what is served there."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from tgis.config.processes import RouterConfig
from tgis.net.http_routes import PROBE_LIMITS, LimitedRoute
from tgis.router.api.http.http_api import HttpApi, find_api
from tgis.router.api.openai.openapi import PATH as DESCRIPTION
from tgis.router.api.openai.playground.page import PATH as PLAYGROUND

ROOT = "/"


def index_routes(config: RouterConfig, served: Sequence[HttpApi]) -> list[LimitedRoute]:
    """Return the route of the root of a port, if OpenAI's API is served on it and no API has this path."""
    if find_api(served, "/v1/models") is None or find_api(served, ROOT) is not None:
        return []
    page = f"; {PLAYGROUND} is a page to try it" if config.playground else ""
    text = f"OpenAI's API is served here under /v1, and described in {DESCRIPTION}{page}.\n"

    async def serve(_: Request) -> PlainTextResponse:
        return PlainTextResponse(text)

    return [LimitedRoute(ROOT, serve, PROBE_LIMITS)]
