"""LMI's error objects."""

import msgspec
from starlette.responses import Response

from tgis.router.api.http.errors import ErrorResponse, describe_error
from tgis.router.requests.doors import LMI


class ErrorBody(msgspec.Struct):
    code: int
    error: str


class LmiErrors:
    """Form of this API's errors."""

    def respond(self, error: Exception) -> Response:
        status, text = describe_error(error, LMI)
        body = msgspec.json.encode(ErrorBody(status, text))
        return ErrorResponse(error, status, body, "application/json")

    def last_events(self, error: Exception) -> bytes:
        return msgspec.json.encode(ErrorBody(*describe_error(error, LMI))) + b"\n"


LMI_ERRORS = LmiErrors()
