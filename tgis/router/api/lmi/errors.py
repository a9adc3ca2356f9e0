"""Writes DJL's error objects: `code` and `error` for refusals and failures of the model's handler; `code`,
`type` and `message` for refusals of its server."""

from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from tgis.router.api.http.errors import ErrorResponse, HttpError, describe_error
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.lmi.rules import LMI
from tgis.router.errors import OverloadedError, RequestError, TimedOutError

UNREADABLE = "Input Parsing failed. Ensure that the request payload is valid. "
MAX_MODEL_CHARS = 256  # maximum length of the name of a missing model
TYPES = {
    400: "BadRequestException",
    401: "UnauthorizedException",
    403: "ForbiddenException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "PayloadTooLargeException",
    415: "UnsupportedMediaTypeException",
    503: "ServiceUnavailableException",
}
"""Types of the server's errors by status."""


class HandlerError(msgspec.Struct):
    code: int
    error: str


class ServerError(msgspec.Struct):
    code: int
    type: str
    message: str


class MissingModelError(HttpError):
    """Refusal of a request for a model that is not served."""

    def __init__(self, name: str) -> None:
        super().__init__(404, f"Model not found: {name[:MAX_MODEL_CHARS]}", "the model is not found")


@dataclass(frozen=True)
class LmiErrors:
    """Form of this API's errors."""

    model: str
    """Name of the served model."""

    def respond(self, error: Exception) -> Response:
        body = self.describe(error)
        parameter = error.parameter if isinstance(error, RequestError) else ""
        return ErrorResponse(error, body.code, encode_json(body), "application/json", parameter)

    def last_events(self, error: Exception) -> bytes:
        return encode_json(self.describe(error)) + b"\n"

    def text(self, error: Exception) -> str:
        return describe_error(error, LMI)[1]

    def describe(self, error: Exception) -> HandlerError | ServerError:
        status, text = describe_error(error, LMI)
        match error:
            case RequestError():
                return HandlerError(status, UNREADABLE + text)
            case OverloadedError():
                text = f"Worker queue capacity exceeded for model: {self.model}"
                return ServerError(status, "WlmCapacityException", text)
            case TimedOutError() if error.is_first:
                return ServerError(status, "TranslateException", f"Time out in: {error.limit_s:g}")
            case MissingModelError():
                return ServerError(status, "ModelNotFoundException", text)
        if status in TYPES:
            return ServerError(status, TYPES[status], text)
        return HandlerError(status, text)
