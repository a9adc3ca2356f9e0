"""Defines routes with their own limits on the time and number of their requests."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

FIRST_S = 10.0  # time for a small request to arrive
MIN_RATE = 16 << 10  # minimum bytes per second of a larger request


class RouteLimits(NamedTuple):
    """Limits of connections with a request for a route. Routes with the same object share its limits."""

    answer_s: float | None
    """Maximum time from a request's first byte until its response is sent; None: unlimited."""
    max_connections: int
    request_s: float = 10.0
    """Maximum time from a request's first byte to its last one, if it arrives at MIN_RATE or faster."""
    idle_s: float = 5.0
    """Maximum time that a connection waits for its next request."""
    refuse: ASGIApp | None = None
    """App that responds to the newest request if there are too many; None: the oldest connection is
    aborted."""

    def arrival_s(self, num_bytes: int) -> float:
        """Return the time limit of a request of which this many bytes have arrived."""
        return min(self.request_s, FIRST_S + num_bytes / MIN_RATE)


PROBE_LIMITS = RouteLimits(answer_s=10.0, max_connections=128)
"""Limits of connections without a complete request, and of ordinary routes. Probes and scrapes need few
connections, and the gRPC port needs the file descriptors."""


class LimitedRoute(Route):
    """Route with its own limits."""

    def __init__(self, path: str, endpoint: Callable[..., Any], limits: RouteLimits, **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        self.limits = limits


class LimitedApp(BaseRoute):
    """App for all paths that `matches_path` accepts, with its own limits."""

    def __init__(self, app: ASGIApp, matches_path: Callable[[str], bool], limits: RouteLimits) -> None:
        self._app = app
        self._matches_path = matches_path
        self.limits = limits

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if self._matches_path(scope["path"]) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def find_route(routes: Iterable[BaseRoute], scope: Any) -> LimitedRoute | LimitedApp | None:
    """Return the route with its own limits that serves a request; None if an ordinary route serves it."""
    for route in routes:
        match = route.matches(scope)[0]
        if isinstance(route, LimitedRoute | LimitedApp) and match is not Match.NONE:
            return route
        if match is Match.FULL:
            return None
    return None
