"""Declares an API over HTTP: its routes and its errors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.routing import Route

from tgis.net.http.routes import LimitedRoute
from tgis.router.api.http.errors import ErrorForm
from tgis.router.api.http.openapi import ErrorTexts, Operation
from tgis.router.requests.api_rules import ApiRules


@dataclass(frozen=True)
class HttpApi:
    rules: ApiRules
    routes: Sequence[Route]
    errors: ErrorForm
    probes: Sequence[Route] = ()
    """Routes that need no token and are served while the model loads."""
    claims: Callable[[bytes], bool] = lambda body: True
    """Returns True if this API answers a body, where another API has the same path."""
    is_served: bool = True
    """False if the operator has not enabled the API. Its paths then answer how to enable it."""
    prefix: str | None = None
    """Unmatched paths with this prefix get this API's 404."""
    operations: Sequence[tuple[Operation, ErrorTexts]] = ()
    """Operations for the OpenAPI document, with their errors."""
    pages: Callable[[bool], Sequence[LimitedRoute]] = lambda is_here: ()
    """Returns the routes of a port's browser pages. The argument is True if the port serves the API."""

    def has_path(self, path: str) -> bool:
        if self.prefix is not None and path.startswith(self.prefix):
            return True
        return any(route.path_regex.match(path) for route in self.routes)


def find_api(apis: Iterable[HttpApi], path: str) -> HttpApi | None:
    """Return the first API that has the path."""
    return next((api for api in apis if api.has_path(path)), None)
