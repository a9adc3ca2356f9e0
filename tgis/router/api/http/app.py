"""Serves APIs over HTTP: authenticates, refuses what no route answers, and turns errors into answers."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from enum import Enum

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tgis.config.processes import RouterConfig
from tgis.net.http_connection import Answer
from tgis.net.http_routes import PROBE_LIMITS, LimitedApp, RouteLimits
from tgis.net.slow_readers import SlowReadError
from tgis.router.api.bearer_tokens import REFUSAL, BearerTokens
from tgis.router.api.http.call_context import open_call, request_id
from tgis.router.api.http.event_stream import BODY
from tgis.router.api.http.openai.errors import ApiError, last_events, respond
from tgis.router.api.tenants import shown_name
from tgis.router.errors import UnavailableError
from tgis.router.metrics.metric_types import Counter

logger = logging.getLogger(__name__)

REQUEST_S, IDLE_S = 60.0, 75.0
MAX_PATH_CHARS = 100  # length in the log, because an unknown client may call any path
API_PATHS = ("/tokenize", "/detokenize", "/version", "/openapi.json")
STARTING, DRAINING = "the model is loading", "the service is shutting down"
CORS_HEADERS = ("authorization", "content-type", "x-request-id", "traceparent", "tracestate")


class Phase(Enum):
    STARTING = STARTING
    OPEN = ""
    DRAINING = DRAINING


class ApiGate:
    """App of all routes of an API. It admits requests, and ends those that outlive a drain."""

    def __init__(self, routes: Sequence[Route], config: RouterConfig, failures: Counter) -> None:
        self.phase = Phase.STARTING
        self._routes, self._failures = routes, failures
        self._tokens = BearerTokens(config.auth_tokens_path) if config.auth_tokens_path else None
        self._max_bytes = config.max_message_bytes
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_cut = False

    async def wait(self, timeout_s: float) -> None:
        """Wait until all requests have been answered, or for a time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def cut(self) -> None:
        """End the requests that are served, with an error."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        self._tasks.add(task)
        try:
            await self._serve(request, send)
        except SlowReadError:
            raise
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            task.uncancel()
            await _fail(UnavailableError(DRAINING), scope, receive, send)
        except Exception as error:
            await _fail(error, scope, receive, send)
        finally:
            self._tasks.discard(task)

    async def _serve(self, request: Request, send: Send) -> None:
        answer: Answer = request.state.answer
        if self.phase is not Phase.OPEN:
            answer.headers += [(b"x-request-id", request_id(request).encode())]
            if self.phase is Phase.DRAINING:
                answer.headers += [(b"connection", b"close")]
            raise UnavailableError(self.phase.value)
        request.state.call = call = open_call(request, self._tenant(request), self._max_bytes)
        answer.headers += [(b"x-request-id", call.id.encode())]
        route = self._find(request)
        await route.handle(request.scope, request.receive, send)

    def _tenant(self, request: Request) -> str:
        """Return the name of the request's tenant, or an empty text if it has none. Raises ApiError."""
        tenant: str | None = ""
        if self._tokens is not None:
            given = request.headers.getlist("authorization")
            tenant = self._tokens.tenant_of_header(given[0]) if len(given) == 1 else None
        if tenant is None:
            self._failures.add("unauthenticated")
            path = request.scope["raw_path"][:MAX_PATH_CHARS].decode("latin-1")
            logger.warning("a call of %s was refused: %s", path, REFUSAL)
            error = ApiError(401, REFUSAL, code="invalid_api_key")
            error.is_logged = True
            raise error
        return tenant or shown_name(request.state.certificate_name.encode("latin-1", "replace"))

    def _find(self, request: Request) -> Route:
        """Return the route of a request. Raises ApiError."""
        methods: set[str] = set()
        for route in self._routes:
            match, scope = route.matches(request.scope)
            if match is Match.FULL:
                request.scope.update(scope)
                return route
            if match is Match.PARTIAL:
                methods |= route.methods or set()
        if not methods:
            raise ApiError(404, "there is no such path in this API")
        request.state.answer.headers += [(b"allow", ", ".join(sorted(methods)).encode())]
        raise ApiError(405, f"the path is served for {', '.join(sorted(methods))} only")


async def _fail(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, or end an answer that has begun with it."""
    if scope["state"]["answer"].has_begun:
        await send({"type": BODY, "body": last_events(error), "more_body": False})
    else:
        await respond(error)(scope, receive, send)


def api_limits(config: RouterConfig) -> RouteLimits:
    """Return the limits of an API's connections, whose answers take any time."""
    return RouteLimits(
        answer_s=None,
        max_connections=config.max_http_connections,
        request_s=REQUEST_S,
        idle_s=IDLE_S,
        refuse=_refuse_overload,
    )


async def _refuse_overload(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(UnavailableError("the service has too many connections"))(scope, receive, send)


def api_route(app: ASGIApp, config: RouterConfig, is_own_port: bool) -> LimitedApp:
    """Return the route to an API, which has all paths of a port of its own."""
    if config.cors_allow_origin:
        origins = [origin.strip() for origin in config.cors_allow_origin.split(",")]
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=CORS_HEADERS,
            expose_headers=("x-request-id",),
        )
    return LimitedApp(app, (lambda _: True) if is_own_port else is_api_path, api_limits(config))


def absent_api_route(config: RouterConfig) -> LimitedApp:
    """Return the route that says where an API is that is not served on this port."""
    text = "this API is not served; to serve it, start the service with --http-api openai"
    if config.http_api:
        text = "this API has a port of its own, which --http-api-port says"

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(ApiError(404, text))(scope, receive, send)

    return LimitedApp(refuse, is_api_path, PROBE_LIMITS)


def is_api_path(path: str) -> bool:
    return path.startswith("/v1/") or path in API_PATHS or path == "/v1"


def starlette_of(routes: Iterable[Route | LimitedApp]) -> Starlette:
    app = Starlette(routes=list(routes))
    app.router.redirect_slashes = False
    return app
