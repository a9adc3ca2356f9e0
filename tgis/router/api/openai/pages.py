"""Serves pages for browsers: the playground, and the root of a port with an overview of the API."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from tgis.config.processes import RouterConfig
from tgis.net.http.routes import PROBE_LIMITS, LimitedRoute
from tgis.router.api.openai.openapi import PATH as DESCRIPTION
from tgis.router.api.openai.playground.page import PATH as PLAYGROUND
from tgis.router.api.openai.playground.page import playground_route

ROOT = "/"


def page_routes(config: RouterConfig, is_here: bool) -> list[LimitedRoute]:
    """Return the routes of a port's pages. `is_here` is True if the port serves the API."""
    playground = playground_route(config, is_here)
    return [playground, _index_route(config)] if is_here else [playground]


def _index_route(config: RouterConfig) -> LimitedRoute:
    page = f"; {PLAYGROUND} is a page to try it" if config.playground else ""
    text = f"OpenAI's API is served here under /v1, and described in {DESCRIPTION}{page}.\n"

    async def serve(_: Request) -> PlainTextResponse:
        return PlainTextResponse(text)

    return LimitedRoute(ROOT, serve, PROBE_LIMITS)
