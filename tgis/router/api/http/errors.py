"""Holds the refusals and errors of HTTP requests before an API formats them."""

import logging
import secrets
from typing import NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgis.router.errors import OverloadedError, ReportedError, RouterError, internal_error
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.http_statuses import http_status

logger = logging.getLogger(__name__)

UNLOGGED = "unlogged_refusal"
"""Key of a request's state with its UnloggedRefusal, set while the refusal is not logged."""
OWN_FORM = "own_form"
"""Key of a request's state, set if its errors do not have its API's form."""
TEMPORARY = (429, 503)
RETRY_S = 1
MAX_REASON_CHARS = 500


class HttpError(ReportedError):
    """Refusal of a request with its own status, the same for every API."""

    def __init__(self, status: int, message: str, log_text: str | None = None) -> None:
        super().__init__(message, log_text)
        self.status = status


class ErrorForm(Protocol):
    """Form of an API's errors."""

    def respond(self, error: Exception) -> Response:
        """Return the answer to a request that fails before its answer begins."""

    def last_events(self, error: Exception) -> bytes:
        """Return the events that end a stream after an error."""


def describe_error(error: Exception, api: ApiRules) -> tuple[int, str]:
    """Return the status and the text of an error. An unforeseen error is logged, and its text contains only
    the id of the log line."""
    if isinstance(error, HttpError):
        return error.status, str(error)
    status = http_status(error, api)
    if isinstance(error, RouterError):
        return status, str(error)
    request_id = secrets.token_hex(8)
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return status, internal_error(request_id)


class UnloggedRefusal(NamedTuple):
    parameter: str
    """Parameter that the refusal names, empty if there is none."""
    reason: str
    """Text for the log, which does not quote the request."""


class ErrorResponse(Response):
    """Answer to a failed request. It is logged unless the error was logged before."""

    def __init__(
        self, error: Exception, status: int, body: bytes, media_type: str | None, parameter: str = ""
    ) -> None:
        """Create the answer. `parameter` is the parameter that the refusal names, if any."""
        retry_s = error.retry_s if isinstance(error, OverloadedError) else RETRY_S
        headers = {"retry-after": str(retry_s)} if status in TEMPORARY else {}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(body, status, headers, media_type)
        self.refusal: UnloggedRefusal | None = None
        if isinstance(error, ReportedError) and not error.is_logged:
            self.refusal = UnloggedRefusal(parameter, error.log_text[:MAX_REASON_CHARS])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.refusal is not None:
            scope.setdefault("state", {})[UNLOGGED] = self.refusal
        await super().__call__(scope, receive, send)
