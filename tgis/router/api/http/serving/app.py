"""Serves the HTTP APIs: authenticates requests, refuses paths without a route, and turns errors into answers.
Where several APIs have a path, the first one that claims the body answers."""

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
from tgis.log_limits import KIND
from tgis.net.http.answer import Answer
from tgis.net.http.routes import PROBE_LIMITS, LimitedApp, RouteLimits
from tgis.net.http.slow_readers import SlowReadError
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import REFUSAL, BearerTokens
from tgis.router.api.http.answers.event_stream import BODY
from tgis.router.api.http.call_context import NUM_BODY_BYTES, open_call, read_body, request_id
from tgis.router.api.http.errors import OWN_FORM, ErrorForm, HttpError
from tgis.router.api.http.http_api import HttpApi, find_api, separated_path
from tgis.router.api.http.json_bodies import BodyReader
from tgis.router.api.http.json_structure import BodyLimits
from tgis.router.api.http.serving.origins import OriginRules
from tgis.router.api.tenants import TokenHolder, gateway_name, shown_name
from tgis.router.errors import UnavailableError
from tgis.router.metrics.metric_types import Counter

logger = logging.getLogger(__name__)

REQUEST_S, IDLE_S = 60.0, 75.0
MAX_PATH_CHARS = 100  # maximum length in the log, because an unknown client may call any path
STARTING, DRAINING = "the model is loading", "the service is shutting down"
CORS_HEADERS = ("authorization", "content-type", "x-request-id", "traceparent", "tracestate")


class Phase(Enum):
    STARTING = STARTING
    OPEN = ""
    DRAINING = DRAINING


class ApiGate:
    """ASGI application for all APIs' routes. It admits requests, and aborts those still open after a
    drain."""

    def __init__(
        self,
        apis: Sequence[HttpApi],
        config: RouterConfig,
        failures: Counter,
        memory: MemoryRelease,
        tokens: BearerTokens | None = None,
    ) -> None:
        """Without `tokens`, calls need none."""
        self.phase = Phase.STARTING
        self.apis = apis
        self._failures = failures
        self._memory = memory
        self._tokens = tokens
        self._trusted_header = config.trust_metadata
        self._origins = OriginRules(config)
        self._bodies = BodyReader(config.max_message_bytes, _body_limits(config))
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_cut = False

    async def wait(self, timeout_s: float) -> None:
        """Wait until all requests are answered, at most `timeout_s` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def cut(self) -> None:
        """End all requests in progress with an error."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request.state.api = find_api(self.apis, scope["path"]) or self.apis[0]
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
            self._memory.count(getattr(request.state, NUM_BODY_BYTES, 0))

    async def _serve(self, request: Request, send: Send) -> None:
        answer: Answer = request.state.answer
        if self.phase is not Phase.OPEN:
            answer.headers += [(b"x-request-id", request_id(request).encode())]
            if self.phase is Phase.DRAINING:
                answer.headers += [(b"connection", b"close")]
            raise UnavailableError(self.phase.value)
        request.state.call = call = open_call(request, self._tenant(request), self._bodies)
        answer.headers += [(b"x-request-id", call.id.encode())]
        self._origins.check(request.method, request.headers)
        route = await self._find(request)
        await route.handle(request.scope, request.receive, send)

    def _tenant(self, request: Request) -> str:
        """Return the name of the request's tenant, empty if it has none. Raises HttpError."""
        holder: TokenHolder | None = TokenHolder()
        if self._tokens is not None:
            given = request.headers.getlist("authorization")
            holder = self._tokens.holder_of_header(given[0]) if len(given) == 1 else None
        if holder is None:
            self._failures.add("unauthenticated")
            path = request.scope["raw_path"][:MAX_PATH_CHARS].decode("latin-1")
            logger.warning(
                "a call of %s was refused: %s", path, REFUSAL, extra={KIND: "HTTP unauthenticated"}
            )
            error = HttpError(401, REFUSAL)
            error.is_logged = True
            raise error
        tenant = holder.tenant
        if self._trusted_header is not None:
            tenant = gateway_name(request.headers.getlist(self._trusted_header)) or tenant
        return tenant or shown_name(request.state.certificate_name.encode("latin-1", "replace"))

    async def _find(self, request: Request) -> Route:
        """Return the route of a request, and set the request's API. Raises HttpError and RequestError."""
        methods: set[str] = set()
        matches: list[tuple[HttpApi, Route, Scope]] = []
        path = separated_path(request.scope)
        has_encoded_slash = path != request.scope["path"]
        for api in self.apis:
            for route in (*api.routes, *api.probes):
                if has_encoded_slash and not route.path_regex.match(path):
                    continue
                match, scope = route.matches(request.scope)
                if match is Match.FULL:
                    matches.append((api, route, scope))
                    break
                if match is Match.PARTIAL:
                    methods |= route.methods or set()
        if matches:
            request.state.api, chosen, scope = await _claim(matches, request)
            request.scope.update(scope)
            return chosen
        if not methods:
            raise HttpError(404, "there is no such path in this API")
        request.state.answer.headers += [(b"allow", ", ".join(sorted(methods)).encode())]
        raise HttpError(405, f"the path is served for {', '.join(sorted(methods))} only")


def _body_limits(config: RouterConfig) -> BodyLimits:
    return BodyLimits(
        config.max_sequence_length or BodyLimits.max_sequence_length,
        config.max_client_batch_size or BodyLimits.max_inputs,
        config.max_guided_bytes,
    )


async def _claim(
    matches: Sequence[tuple[HttpApi, Route, Scope]], request: Request
) -> tuple[HttpApi, Route, Scope]:
    """Return the first match whose API claims the body, or the last match. Raises RequestError and
    PayloadTooLargeError."""
    if len(matches) == 1:
        return matches[0]
    body = await read_body(request)
    return next((each for each in matches if each[0].claims(body)), matches[-1])


async def _fail(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error. If the answer has begun, end it with the error."""
    form: ErrorForm = scope["state"].get(OWN_FORM) or scope["state"]["api"].errors
    if scope["state"]["answer"].has_begun:
        await send({"type": BODY, "body": form.last_events(error), "more_body": False})
    else:
        await form.respond(error)(scope, receive, send)


def api_limits(apis: Sequence[HttpApi], config: RouterConfig) -> RouteLimits:
    """Return the connection limits of the APIs. An answer may take any time."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        error = UnavailableError("the service has too many connections")
        form = (find_api(apis, scope["path"]) or apis[0]).errors
        await form.respond(error)(scope, receive, send)

    return RouteLimits(
        answer_s=None,
        max_connections=config.max_http_connections,
        request_s=REQUEST_S,
        idle_s=IDLE_S,
        refuse=refuse,
    )


def api_route(app: ASGIApp, apis: Sequence[HttpApi], config: RouterConfig, is_own_port: bool) -> LimitedApp:
    """Return the route to the APIs. On a port of their own, the APIs get all paths."""
    if config.cors_allow_origin:
        origins = [origin.strip() for origin in config.cors_allow_origin.split(",")]
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=CORS_HEADERS,
            expose_headers=("x-request-id",),
        )

    def has_path(path: str) -> bool:
        return is_own_port or find_api(apis, path) is not None

    return LimitedApp(app, has_path, api_limits(apis, config))


def absent_api_routes(apis: Iterable[HttpApi]) -> list[LimitedApp]:
    """Return routes that answer where these APIs are. The port does not serve them."""
    return [_absent_route(api) for api in apis]


def _absent_route(api: HttpApi) -> LimitedApp:
    text = f"this API is not served; to serve it, start the service with --http-api {api.rules.name}"
    if api.is_served:
        text = "this API has a port of its own, which --http-api-port says"

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await api.errors.respond(HttpError(404, text))(scope, receive, send)

    return LimitedApp(refuse, api.has_path, PROBE_LIMITS)


def starlette_of(routes: Iterable[Route | LimitedApp]) -> Starlette:
    app = Starlette(routes=list(routes))
    app.router.redirect_slashes = False
    return app
