"""OpenAI's error object."""

import logging
import secrets

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgis.router.api.http.answer_accounts import REFUSED_PARAMETER
from tgis.router.api.http.openai.events import DONE, encode_event
from tgis.router.errors import RouterError, internal_error
from tgis.router.requests.http_statuses import http_status

logger = logging.getLogger(__name__)

TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""The API's types of errors by status; other statuses are of invalid requests."""
TEMPORARY, RETRY_S = (429, 503), 1
MAX_MODEL_CHARS = 256  # of a model that does not exist


class ErrorDetails(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetails


class ApiError(Exception):
    """Refusal of a request in this API's terms."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.is_logged = False
        self.status, self.details = status, _details(status, message, param, code)


def missing_model(name: str | None) -> ApiError:
    text = f"The model '{(name or '')[:MAX_MODEL_CHARS]}' does not exist."
    return ApiError(404, text, "model", "model_not_found")


def describe(error: Exception) -> tuple[int, ErrorDetails]:
    """Return the status and the details of an error. An unforeseen one is logged, and tells its id only."""
    if isinstance(error, ApiError):
        return error.status, error.details
    status = http_status(error)
    if isinstance(error, RouterError):
        return status, _details(status, str(error))
    request_id = secrets.token_hex(8)
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return status, _details(status, internal_error(request_id))


def _details(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorDetails:
    return ErrorDetails(message, TYPES.get(status, "invalid_request_error"), param, code)


def respond(error: Exception) -> Response:
    status, details = describe(error)
    headers = {"retry-after": str(RETRY_S)} if status in TEMPORARY else {}
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
    return encode_event(ErrorBody(describe(error)[1])) + DONE
