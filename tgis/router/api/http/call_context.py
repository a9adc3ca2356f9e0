"""What the APIs over HTTP share: who calls, under which ids, and the body of the request."""

import re
import secrets
from dataclasses import dataclass, field

from starlette.requests import Request

from tgis.router.errors import PayloadTooLargeError, RequestError
from tgis.router.requests.call import Metadata

MAX_ID_CHARS = 128
MAX_DEPTH = 64

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class HttpCall:
    """Facts of one request that hold for every API."""

    connection: str
    """Where it comes from; calls of one connection take turns."""
    tenant: str
    """Name that the caller's token or certificate has; empty if it has none."""
    metadata: Metadata
    """Headers, their names in lower case."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """The client's `x-request-id` if it is printable ASCII and not too long, else a new id."""
    max_body_bytes: int = 4 << 20


def open_call(request: Request, tenant: str, max_body_bytes: int) -> HttpCall:
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
    client = request.client
    connection = f"{client.host}:{client.port}" if client else ""
    return HttpCall(connection, tenant, headers, request_id(request), max_body_bytes)


def request_id(request: Request) -> str:
    """Return the client's id of the request if it can be shown as it is, else a new one."""
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)


async def read_body(request: Request) -> bytes:
    """Return the body. Raises PayloadTooLargeError and, for deeply nested JSON, RequestError."""
    most = request.state.call.max_body_bytes
    if int(request.headers.get("content-length", 0)) > most:  # the parser has checked that it is a number
        raise PayloadTooLargeError(most)
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > most:
            raise PayloadTooLargeError(most)
        parts.append(part)
    body = b"".join(parts)
    check_depth(body)
    return body


def check_depth(body: bytes, most: int = MAX_DEPTH) -> None:
    """Raise RequestError if JSON is nested more than `most` levels deep. Parsers may use a stack."""
    if body.count(b"[") + body.count(b"{") <= most:
        return
    brackets = _STRINGS.sub(b"", body).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(most):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    if brackets.count(b"[") > most or b"[]" in brackets:
        raise RequestError(f"the JSON is nested more than {most} levels deep")
