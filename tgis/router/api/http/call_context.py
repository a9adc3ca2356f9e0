"""What the APIs over HTTP share: who calls, under which ids, and the body of the request."""

import secrets
from dataclasses import dataclass, field

from starlette.requests import Request

from tgis.router.requests.call import Metadata

MAX_ID_CHARS = 128


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


def open_call(request: Request, tenant: str = "") -> HttpCall:
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
    client = request.client
    connection = f"{client.host}:{client.port}" if client else ""
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return HttpCall(connection, tenant, headers, given)
    return HttpCall(connection, tenant, headers)


async def read_body(request: Request) -> bytes:
    return await request.body()
