"""Writes OpenAI's error object."""

import msgspec
from starlette.responses import Response

from tgis.router.api.http.answers.event_stream import DONE, encode_event
from tgis.router.api.http.errors import ErrorResponse, HttpError, describe_error
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.openai.rules import OPENAI
from tgis.router.errors import RequestError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Types of errors by status. All other statuses have the type of invalid requests."""
CODES = {401: "invalid_api_key"}
MAX_MODEL_CHARS = 256  # maximum length of the name of a missing model
MISSING_MODEL = "the model does not exist"
"""Text for the log, in which the name would be the client's text."""


class ErrorDetails(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetails


class ApiError(HttpError):
    """Refusal of a request in this API's terms."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        log_text: str | None = None,
    ) -> None:
        super().__init__(status, message, log_text)
        self.param = param
        self.code = code


def missing_model(name: str | None) -> ApiError:
    text = f"The model '{(name or '')[:MAX_MODEL_CHARS]}' does not exist."
    return ApiError(404, text, "model", "model_not_found", MISSING_MODEL)


def as_api_error(error: RequestError, param: str | None = None, status: int = 400) -> ApiError:
    """Return the service's refusal as an error about a field, by default about its own."""
    return ApiError(status, str(error), param or error.parameter or None, log_text=error.log_text)


def describe(error: Exception) -> tuple[int, ErrorDetails]:
    """Return an error's status and details. An unforeseen error's text has only the id of the log line."""
    status, text = describe_error(error, OPENAI)
    param, code = (error.param, error.code) if isinstance(error, ApiError) else (None, CODES.get(status))
    return status, ErrorDetails(text, TYPES.get(status, "invalid_request_error"), param, code)


class OpenAiErrors:
    """Form of this API's errors."""

    def respond(self, error: Exception) -> Response:
        status, details = describe(error)
        body = encode_json(ErrorBody(details))
        return ErrorResponse(error, status, body, "application/json", details.param or "")

    def last_events(self, error: Exception) -> bytes:
        return encode_event(ErrorBody(describe(error)[1])) + DONE


OPENAI_ERRORS = OpenAiErrors()
