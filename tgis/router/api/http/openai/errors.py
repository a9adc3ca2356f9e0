"""OpenAI's error object, and the one table from the router's errors to its statuses."""

import logging
import secrets

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgis.router.api.http.answer_accounts import REFUSED_PARAMETER
from tgis.router.errors import (
    Code,
    NotFoundError,
    PayloadTooLargeError,
    RouterError,
    internal_error,
)

logger = logging.getLogger(__name__)

STATUS = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.UNAVAILABLE: (503, "service_unavailable_error"),
    Code.INTERNAL: (500, "server_error"),
}
RETRY_S = 1


class ErrorDetails(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetails


class ApiError(Exception):
    """Refusal of a request before it reaches the service."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self.is_logged = False
        self.status, self.details = status, ErrorDetails(message, kind, param, code)


def describe(error: Exception) -> tuple[int, ErrorDetails]:
    """Return the status and the details of an error. An unforeseen one is logged, and tells its id only."""
    if isinstance(error, ApiError):
        return error.status, error.details
    if isinstance(error, NotFoundError):
        return 404, ErrorDetails(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, PayloadTooLargeError):
        return 413, ErrorDetails(str(error), "invalid_request_error")
    if isinstance(error, RouterError):
        status, kind = STATUS[error.code]
        return status, ErrorDetails(str(error), kind)
    request_id = secrets.token_hex(8)
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return 500, ErrorDetails(internal_error(request_id), STATUS[Code.INTERNAL][1])


def respond(error: Exception) -> Response:
    status, details = describe(error)
    headers = {"retry-after": str(RETRY_S)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(ErrorBody(details))
    response = ErrorResponse(body, status, headers, media_type="application/json")
    is_unlogged = isinstance(error, ApiError | RouterError) and not error.is_logged
    response.refused_parameter = (details.param or "") if is_unlogged else None
    return response


class ErrorResponse(Response):
    refused_parameter: str | None = None
    """Parameter that the refusal names; None if the log has a line of the error already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.refused_parameter is not None:
            scope.setdefault("state", {})[REFUSED_PARAMETER] = self.refused_parameter
        await super().__call__(scope, receive, send)


def last_events(error: Exception) -> bytes:
    """Return the events that end a stream for an error."""
    return b"data: " + msgspec.json.encode(ErrorBody(describe(error)[1])) + b"\n\ndata: [DONE]\n\n"
