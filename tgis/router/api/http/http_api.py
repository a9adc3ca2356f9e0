"""An API over HTTP: its routes and its errors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.routing import Route

from tgis.router.api.http.errors import ErrorForm
from tgis.router.api.http.openapi import ErrorTexts, Operation
from tgis.router.requests.doors import Door


@dataclass(frozen=True)
class HttpApi:
    door: Door
    routes: Sequence[Route]
    errors: ErrorForm
    probes: Sequence[Route] = ()
    """Routes that need no token, and are served while the model loads."""
    claims: Callable[[bytes], bool] = lambda body: True
    """True for the body of a request that this API answers, if the path is one of another API too."""

    prefix: str | None = None
    """Beginning of paths of which it answers those that nobody has."""
    operations: Sequence[tuple[Operation, ErrorTexts]] = ()
    """Operations for the OpenAPI document, with their errors."""

    def has_path(self, path: str) -> bool:
        if self.prefix is not None and path.startswith(self.prefix):
            return True
        return any(route.path_regex.match(path) for route in self.routes)


def find_api(apis: Iterable[HttpApi], path: str) -> HttpApi | None:
    """Return the first API that has the path."""
    return next((api for api in apis if api.has_path(path)), None)
