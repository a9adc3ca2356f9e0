"""Declares an API over HTTP: its routes and its errors."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.routing import Route
from starlette.types import Scope

from tgis.net.http.routes import LimitedRoute
from tgis.router.api.http.errors import ErrorForm
from tgis.router.api.http.openapi import ErrorTexts, Operation
from tgis.router.requests.api_rules import ApiRules

_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)


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


def separated_path(scope: Scope) -> str:
    """Return the decoded path of a request, but with its encoded slashes. They belong to names, and do not
    separate parts of a path; otherwise a gateway that refuses some paths would have to know other forms of
    them."""
    raw_path: bytes = scope["raw_path"]
    if b"%" not in raw_path:
        path: str = scope["path"]
        return path
    return unquote(_ENCODED_SLASH.sub(b"%252F", raw_path).decode("latin-1"))
