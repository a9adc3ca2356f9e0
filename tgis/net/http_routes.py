"""Routes with limits of their own: they say what is too long and too many for their requests."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import httptools
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

FIRST_S = 10.0  # time for a request of few bytes to arrive
LEAST_RATE = 16 << 10  # bytes per second of a request that arrives for longer


class RouteLimits(NamedTuple):
    """Limits of the connections that have a request for a route. They are counted together where several
    routes have the same object."""

    answer_s: float | None
    """Time from a request's first byte until its answer is sent; None: unlimited."""
    max_connections: int
    request_s: float = 10.0
    """Time from a request's first byte until its last one, if its bytes come fast enough."""
    idle_s: float = 5.0
    """Time that a connection waits for its next request."""
    refuse: ASGIApp | None = None
    """Answers the newest request if there are too many; None: the oldest connection is aborted."""

    def arrival_s(self, num_bytes: int) -> float:
        """Return the time limit of a request of which so many bytes have come."""
        return min(self.request_s, FIRST_S + num_bytes / LEAST_RATE)


PROBE_LIMITS = RouteLimits(answer_s=10.0, max_connections=128)
"""Limits of connections without a whole request, and of usual routes. Probes and scrapes need a few
connections; the gRPC port needs the file descriptors more."""


class LimitedRoute(Route):
    """Route whose requests have limits of their own."""

    def __init__(self, path: str, endpoint: Callable[..., Any], limits: RouteLimits, **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        self.limits = limits


class LimitedApp(BaseRoute):
    """App for all paths that `matches_path` says, whose requests have limits of their own."""

    def __init__(self, app: ASGIApp, matches_path: Callable[[str], bool], limits: RouteLimits) -> None:
        self._app, self._matches_path, self.limits = app, matches_path, limits

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if self._matches_path(scope["path"]) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def find_route(routes: Iterable[BaseRoute], scope: Any) -> LimitedRoute | LimitedApp | None:
    """Return the route with limits of its own that serves a request; None if there is none, or if a usual
    route is before it."""
    for route in routes:
        match = route.matches(scope)[0]
        if isinstance(route, LimitedRoute | LimitedApp) and match is not Match.NONE:
            return route
        if match is Match.FULL:
            return None
    return None


def has_path(url: bytes) -> bool:
    """Return whether the target of a request can be told apart by its path."""
    if not url.isascii():
        return False
    try:
        return httptools.parse_url(url).path is not None
    except httptools.HttpParserInvalidURLError:
        return False
