"""Reads bodies of requests. An unreadable body is refused in plain text, as TGI does."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from tgis.router.api.http.call_context import media_type, read_body
from tgis.router.api.http.fields.invalid_fields import describe_invalid
from tgis.router.api.http.fields.invalid_json import describe_invalid_json
from tgis.router.api.tgi.errors import BodyError
from tgis.router.errors import RequestError

NO_JSON_TYPE = "Expected request with `Content-Type: application/json`"
NOT_JSON = "Failed to parse the request body as JSON: {}"
WRONG = "Failed to deserialize the JSON body into the target type: {}"

T = TypeVar("T")


class _Keys(msgspec.Struct):
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_keys_decoder = msgspec.json.Decoder(_Keys)


async def read_json(request: Request) -> bytes:
    """Return the body of a request whose content type is JSON. Raises BodyError and PayloadTooLargeError."""
    kind = media_type(request)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BodyError(415, NO_JSON_TYPE)
    try:
        return await read_body(request)
    except RequestError as error:
        raise BodyError(400, NOT_JSON.format(error), NOT_JSON.format(error.log_text)) from None


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the request in a body. Raises BodyError, which quotes no value."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BodyError(422, WRONG.format(describe_invalid(error, decoder.type).text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"it is not valid JSON in UTF-8: {describe_invalid_json(error, body)}"
        raise BodyError(400, NOT_JSON.format(reason)) from None
    except RecursionError:
        raise BodyError(400, NOT_JSON.format("it is nested too deeply")) from None


def main_field(body: bytes) -> str:
    """Return the first of `inputs`, `messages` and `prompt`, in this order, that the body contains, or an
    empty text. Raises BodyError."""
    keys = decode(_keys_decoder, body)
    return next((name for name in _Keys.__struct_fields__ if getattr(keys, name) is not msgspec.UNSET), "")


def has_inputs(body: bytes) -> bool:
    try:
        return main_field(body) == "inputs"
    except BodyError:
        return False
