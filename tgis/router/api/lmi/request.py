"""Reads a request: its body, and headers that SageMaker may have set."""

import msgspec
from starlette.requests import Request

from tgis.router.api.http.call_context import PLAIN_TEXT
from tgis.router.api.http.errors import HttpError
from tgis.router.api.http.json_bodies import decode_body
from tgis.router.api.lmi.errors import MissingModelError
from tgis.router.api.lmi.parameters import LmiParameters
from tgis.router.errors import RequestError

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
ADAPTER = "x-amzn-sagemaker-adapter-identifier"
MAX_ATTRIBUTES = 1024
NO_INPUTS = "the body must have inputs, or messages or a prompt as OpenAI's API has them"


class LmiRequest(msgspec.Struct, kw_only=True):
    inputs: str | list[str] | None = None
    parameters: LmiParameters | None = None
    stream: bool | None = None
    model_name: str | None = None
    adapters: str | list[str | None] | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()

    @property
    def is_chat(self) -> bool:
        return self.inputs is None and bool(self.messages)

    @property
    def is_completion(self) -> bool:
        return self.inputs is None and not self.is_chat and bool(self.prompt)

    @property
    def texts(self) -> list[str]:
        assert self.inputs is not None, "requests without inputs are others"
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs

    def adapter_ids(self, header: str | None) -> list[str | None]:
        """Return each input's adapter, or None for the plain model. Raises RequestError."""
        given = header if self.adapters is None else self.adapters
        if not isinstance(given, list):
            return [given or None] * len(self.texts)
        if len(given) != len(self.texts):
            raise RequestError("Number of adapters is not equal to the number of inputs", "adapters")
        return [each or None for each in given]


_decoder = msgspec.json.Decoder(LmiRequest)


def read_request(kind: str, body: bytes) -> LmiRequest:
    """Return the request in a body of media type `kind`. Raises RequestError and HttpError."""
    if kind == PLAIN_TEXT:
        read = LmiRequest(inputs=_decode_text(body))
    elif kind in ("", "application/json"):
        read = decode_body(_decoder, body)
    else:
        raise HttpError(415, "the content type must be application/json or text/plain")
    if read.inputs is None and not (read.is_chat or read.is_completion):
        raise RequestError(NO_INPUTS, "inputs")
    if read.inputs is not None and not (read.texts and all(read.texts)):
        raise RequestError("inputs must be a text that is not empty, or a list of them", "inputs")
    return read


def _decode_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None


def check_headers(request: Request) -> None:
    """Copy the client's attributes to the answer, and refuse unsupported headers. Raises RequestError."""
    if request.headers.get("x-synchronous", "").lower() == "false":
        raise RequestError("answers that are fetched later are not supported; leave x-synchronous out")
    attributes = request.headers.get(ATTRIBUTES)
    if attributes is None:
        return
    if not (len(attributes) <= MAX_ATTRIBUTES and attributes.isascii() and attributes.isprintable()):
        raise RequestError(f"{ATTRIBUTES} must have at most {MAX_ATTRIBUTES} printable characters of ASCII")
    request.state.answer.headers += [(ATTRIBUTES.encode(), attributes.encode())]


def check_model(request: Request, body: LmiRequest, names: tuple[str, ...]) -> None:
    """Check that every name of a model in the request is the served model's. Raises MissingModelError."""
    path = request.path_params.get("model")
    if path is not None and path not in names and path.rpartition("/")[0] not in names:
        raise MissingModelError(path)
    given = (request.query_params.get("model_name"), request.headers.get("model_name"), body.model_name)
    for name in given:
        if name and name not in names:
            raise MissingModelError(name)
