"""Facts of a request that all APIs over HTTP share: who calls, under which id, and the body."""

import secrets
from dataclasses import dataclass

from starlette.requests import Request

from tgis.router.api.http.json_bodies import BodyReader
from tgis.router.errors import PayloadTooLargeError
from tgis.router.requests.call import Metadata
from tgis.router.requests.span_protocols import SCHEME

MAX_ID_CHARS = 128
PLAIN_TEXT = "text/plain"
NUM_BODY_BYTES = "num_body_bytes"
"""Key of a request's state, set once its body has come."""


@dataclass(frozen=True)
class HttpCall:
    """Facts of one request that hold for every API."""

    connection: str
    """Where it comes from; calls of one connection take turns."""
    tenant: str
    """Name that the caller's token or certificate has; empty if it has none."""
    metadata: Metadata
    """Headers, their names in lower case, and the scheme."""
    id: str
    """The client's `x-request-id` if it is printable ASCII and not too long, else a new id."""
    bodies: BodyReader

    @property
    def owner(self) -> str:
        """Whose turn it is in queues: the tenant's, or the host's, whose connections are many."""
        return self.tenant or self.connection.rpartition(":")[0]


def open_call(request: Request, tenant: str, bodies: BodyReader) -> HttpCall:
    """Read who calls. The metadata name the scheme, and a new id instead of one that is not valid."""
    given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
    own_id = request_id(request)
    own = ((SCHEME, request.scope["scheme"]), ("x-request-id", own_id))
    metadata = (*(pair for pair in given if pair[0] != "x-request-id"), *own)
    client = request.client
    connection = f"{client.host}:{client.port}" if client else ""
    return HttpCall(connection, tenant, metadata, own_id, bodies)


def request_id(request: Request) -> str:
    """Return the client's id of the request if it can be shown as it is, else a new one."""
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)


def media_type(request: Request) -> str:
    """Return what a request says that its body is, without parameters; empty if it says nothing."""
    return request.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()


async def read_body(request: Request) -> bytes:
    """Return the body, which may be read more than once. Raises PayloadTooLargeError and, unless it says that
    it is a plain text, RequestError and OverloadedError for JSON that is nested deeply or has many values."""
    if (read := getattr(request.state, "body", None)) is not None:
        return bytes(read)
    call: HttpCall = request.state.call
    most = call.bodies.max_bytes
    if int(request.headers.get("content-length", 0)) > most:  # the parser has checked that it is a number
        raise PayloadTooLargeError(most)
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > most:
            raise PayloadTooLargeError(most)
        parts.append(part)
    setattr(request.state, NUM_BODY_BYTES, num_bytes)
    body = b"".join(parts)
    parts.clear()
    if media_type(request) != PLAIN_TEXT:  # which no API reads as JSON
        await call.bodies.check(body, call.owner)
    request.state.body = body
    return body
