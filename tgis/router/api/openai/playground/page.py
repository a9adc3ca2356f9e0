"""Serves a page that chats with the service in a browser. The page contains its styles and scripts, and loads
nothing else. It contains no data of the service and needs no token, but the calls that it makes do."""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from tgis.config.processes import RouterConfig
from tgis.net.http.routes import PROBE_LIMITS, LimitedRoute
from tgis.router.api.http.errors import HttpError
from tgis.router.api.openai.errors import OPENAI_ERRORS

PATH = "/playground"
LIBRARY = "marked.js"
"""File of the npm package `marked` as published. It renders Markdown (MIT, marked-license.md)."""
SCRIPTS = ("api.js", "transcript.js", "markdown.js", "tokens.js", "settings.js", "meter.js", "main.js")
"""Files of the page's own script, in their execution order."""
NOT_SERVED = "the playground is not served; --http-api openai and --playground serve it"
ELSEWHERE = "the playground has the port of its API, which --http-api-port says"


def playground_route(config: RouterConfig, has_api: bool) -> LimitedRoute:
    """Return the page's route on a port, or a route that answers where the page is."""

    page = _page() if config.playground and has_api else None

    async def serve(request: Request) -> Response:
        if page is None:
            return OPENAI_ERRORS.respond(HttpError(404, ELSEWHERE if config.playground else NOT_SERVED))
        return page

    return LimitedRoute(PATH, serve, PROBE_LIMITS)


def _page() -> Response:
    """Return the answer with the page. Its policy allows only the page's own style and scripts."""
    style = _read("page.css")
    library = _read(LIBRARY)
    script = "\n".join(map(_read, SCRIPTS))
    html = _read("page.html").replace("/* STYLE */", style).replace("/* LIBRARY */", library)
    html = html.replace("/* SCRIPT */", script)
    headers = {
        "content-security-policy": _policy(style, library, script),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, *scripts: str) -> str:
    rules = (
        "default-src 'none'",
        f"style-src {_hash(style)}",
        f"script-src {' '.join(map(_hash, scripts))}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
