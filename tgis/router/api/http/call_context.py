"""What the APIs over HTTP share: who calls, under which ids, and the body of the request."""

import secrets
from dataclasses import dataclass, field

from starlette.requests import Request

from tgis.router.requests.call import Metadata
from tgis.router.requests.span_protocols import SCHEME

MAX_ID_CHARS = 128


@dataclass(frozen=True)
class HttpCall:
    """Facts of one request that hold for every API."""

    connection: str
    """Where it comes from; calls of one connection take turns."""
    tenant: str
    """Name that the caller's token or certificate has; empty if it has none."""
    metadata: Metadata
    """Headers, their names in lower case, and the scheme."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """The client's `x-request-id` if it is printable ASCII and not too long, else a new id."""


def open_call(request: Request, tenant: str = "") -> HttpCall:
    """Read who calls. The metadata name the scheme, and a new id instead of one that is not valid."""
    given = request.headers.get("x-request-id", "")
    is_valid = 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable()
    request_id = given if is_valid else secrets.token_hex(16)
    headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
    own = ((SCHEME, request.url.scheme), ("x-request-id", request_id))
    metadata = (*(pair for pair in headers if pair[0] != "x-request-id"), *own)
    client = request.client
    return HttpCall(f"{client.host}:{client.port}" if client else "", tenant, metadata, request_id)
