"""Writes TGI's errors: an object, or plain text for an unreadable body."""

import msgspec
from starlette.responses import Response

from tgis.router.api.http.errors import ErrorResponse, HttpError, describe_error
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.tgi.rules import TGI
from tgis.router.errors import NotFoundError, PayloadTooLargeError, RequestError

UNHEALTHY = "healthcheck"
TYPES = {
    404: "not_found",
    422: "validation",
    424: "generation",
    429: "overloaded",
    503: UNHEALTHY,
}
"""Types of errors by status."""
WITHOUT_BODY = (401, 405)
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
INVALID = "Input validation error: {}"


class TgiErrorBody(msgspec.Struct):
    error: str
    error_type: str


class BodyError(HttpError):
    """Refusal of a request with an unreadable body, in plain text."""


class TemplateError(HttpError):
    """Refusal of a chat that the model's template cannot render."""

    def __init__(self, message: str, log_text: str) -> None:
        super().__init__(422, message, log_text)


class TgiErrors:
    """Form of this API's errors."""

    def respond(self, error: Exception) -> Response:
        status, body = _describe(error)
        if status in WITHOUT_BODY:
            return ErrorResponse(error, status, b"", None)
        if isinstance(error, BodyError | PayloadTooLargeError):
            return ErrorResponse(error, status, body.error.encode(), "text/plain; charset=utf-8")
        return ErrorResponse(error, status, encode_json(body), "application/json")

    def last_events(self, error: Exception) -> bytes:
        return b"data: %b\n\n" % encode_json(_describe(error)[1])


TGI_ERRORS = TgiErrors()


def _describe(error: Exception) -> tuple[int, TgiErrorBody]:
    status, text = describe_error(error, TGI)
    if isinstance(error, PayloadTooLargeError):
        text = TOO_LARGE
    if isinstance(error, RequestError) and not isinstance(error, NotFoundError):
        text = INVALID.format(text)
    kind = "template_error" if isinstance(error, TemplateError) else TYPES.get(status, "validation")
    return status, TgiErrorBody(text, kind)
