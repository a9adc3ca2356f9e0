"""Counts the answers of an HTTP API, and logs one line for each request that is refused before it reaches the
service. Neither contains text of a request."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tgis.log_limits import KIND
from tgis.logs import FIELDS, Scalar
from tgis.router.api.http.answers.event_stream import STREAM_TYPES
from tgis.router.api.http.errors import UNLOGGED, UnloggedRefusal
from tgis.router.api.http.http_api import HttpApi, find_api, separated_path
from tgis.router.metrics.metrics import Metrics
from tgis.router.requests.api_rules import ApiRules

logger = logging.getLogger(__name__)

OTHER_ROUTE = "other"


@dataclass
class AnswerAccounts:
    """ASGI application that counts the answers of `app`, which serves the given APIs."""

    app: ASGIApp
    apis: Sequence[HttpApi]
    metrics: Metrics
    num_requests: int = field(default=0, init=False)
    num_streams: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.metrics.http_api_connections.follow(lambda: self.num_requests)
        self.metrics.http_api_streams.follow(lambda: self.num_streams)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_stream = False

        async def send_counted(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = _is_stream(message)
                self.num_streams += is_stream
                self._count(scope, message["status"])
            await send(message)

        self.num_requests += 1
        try:
            await self.app(scope, receive, send_counted)
        finally:
            self.num_requests -= 1
            self.num_streams -= is_stream

    def _count(self, scope: Scope, status: int) -> None:
        path = separated_path(scope)
        state = scope.get("state", {})
        api = state.get("api") or find_api(self.apis, path) or self.apis[0]
        route = next((one.path for one in api.routes if one.path_regex.match(path)), OTHER_ROUTE)
        self.metrics.http_api_requests.add(api.rules.name, route, str(status))
        refusal: UnloggedRefusal | None = state.get(UNLOGGED)
        if status >= 400 and refusal is not None:
            self._log(api.rules, scope, route, status, refusal)

    def _log(self, rules: ApiRules, scope: Scope, route: str, status: int, refusal: UnloggedRefusal) -> None:
        method = scope["method"]
        fields: dict[str, Scalar] = {"api": rules.name, "method": route, "code": status}
        call = scope["state"].get("call")
        if request_id := getattr(call, "id", ""):
            fields["correlation_id"] = request_id
        if tenant := getattr(call, "tenant", ""):
            fields["tenant"] = tenant
        if refusal.parameter:
            fields["parameter"] = refusal.parameter[:128]
        about: dict[str, object] = {FIELDS: fields}
        if not any(name == b"authorization" for name, _ in scope["headers"]):
            about[KIND] = f"HTTP refused {status}"
        logger.warning("%s %s is refused with %d: %s", method, route, status, refusal.reason, extra=about)


def _is_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.decode("latin-1").startswith(STREAM_TYPES)
        for name, value in message.get("headers", ())
    )
