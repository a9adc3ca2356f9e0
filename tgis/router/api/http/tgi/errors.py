"""TGI's error object."""

import msgspec
from starlette.responses import Response

from tgis.router.api.http.errors import ErrorResponse, describe_error
from tgis.router.requests.doors import TGI

TYPES = {
    404: "not_found",
    422: "validation",
    424: "generation",
    429: "overloaded",
    503: "healthcheck",
}
"""The API's types of errors by status."""


class ErrorBody(msgspec.Struct):
    error: str
    error_type: str


class TgiErrors:
    """Form of this API's errors."""

    def respond(self, error: Exception) -> Response:
        status, text = describe_error(error, TGI)
        body = msgspec.json.encode(ErrorBody(text, TYPES.get(status, "validation")))
        return ErrorResponse(error, status, body, "application/json")

    def last_events(self, error: Exception) -> bytes:
        status, text = describe_error(error, TGI)
        return b"data: %b\n\n" % msgspec.json.encode(ErrorBody(text, TYPES.get(status, "validation")))


TGI_ERRORS = TgiErrors()
