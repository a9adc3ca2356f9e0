"""Reads the parts of a request that all APIs over HTTP share: the caller, the request's id and the body."""

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
"""Key of a request's state, set once the body has been received."""


@dataclass(frozen=True)
class HttpCall:
    """Facts of one request that all APIs share."""

    connection: str
    """Client's address and port. The calls of one connection take turns."""
    tenant: str
    """Tenant of the caller's token or certificate; empty if it has none."""
    metadata: Metadata
    """Headers with names in lower case, and the scheme."""
    id: str
    """The client's `x-request-id` if it is short printable ASCII, otherwise a new id."""
    bodies: BodyReader

    @property
    def owner(self) -> str:
        """Owner of the call in queues: the tenant, or the host, because a host may open many connections."""
        return self.tenant or self.connection.rpartition(":")[0]


def open_call(request: Request, tenant: str, bodies: BodyReader) -> HttpCall:
    """Read the caller of a request. The metadata have the scheme, and a new id for an invalid one."""
    given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
    own_id = request_id(request)
    own = ((SCHEME, request.scope["scheme"]), ("x-request-id", own_id))
    metadata = (*(pair for pair in given if pair[0] != "x-request-id"), *own)
    client = request.client
    connection = f"{client.host}:{client.port}" if client else ""
    return HttpCall(connection, tenant, metadata, own_id, bodies)


def request_id(request: Request) -> str:
    """Return the client's request id if it is valid, otherwise a new one."""
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)


def media_type(request: Request) -> str:
    """Return the body's media type from the headers, without parameters; empty if the header is missing."""
    return request.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()


async def read_body(request: Request) -> bytes:
    """Return the body. It may be read repeatedly. Raises PayloadTooLargeError. Unless the body is declared as
    plain text, raises RequestError or OverloadedError for JSON that is nested deeply or has many values."""
    if (read := getattr(request.state, "body", None)) is not None:
        return bytes(read)
    call: HttpCall = request.state.call
    max_bytes = call.bodies.max_bytes
    # The parser has checked that the header is a number.
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise PayloadTooLargeError(max_bytes)
    parts = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise PayloadTooLargeError(max_bytes)
        parts.append(part)
    setattr(request.state, NUM_BODY_BYTES, num_bytes)
    body = b"".join(parts)
    parts.clear()
    if media_type(request) != PLAIN_TEXT:  # no API reads plain text as JSON
        await call.bodies.check(body, call.owner)
    request.state.body = body
    return body
