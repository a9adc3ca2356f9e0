"""Defines what a client of an API is, and what it needs to reach the service."""

from dataclasses import dataclass, field
from typing import Protocol

from tgis.load.records import AnswerReceiver, Prompting


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """Address of the service, and the credentials of calls."""

    address: str
    """HOST:PORT."""
    path: str = ""
    """Path before those of an HTTP API."""
    is_tls: bool = False
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    model: str | None = None
    num_channels: int = 1
    """Number of connections that calls over gRPC share."""
    calls_per_connection: int | None = None
    """Number of calls after which a connection is replaced by a new one; None: never."""


class ApiClient(Protocol):
    """Client of one API, for one event loop."""

    async def open(self) -> None:
        """Prepare for calls. Raises AnswerError if the service cannot be reached."""

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        """Send a request and receive its stream. Raises AnswerError."""

    async def close(self) -> None: ...
