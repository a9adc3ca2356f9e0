"""Connects a router to its shards over Unix sockets, or over TCP with mutual TLS."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from tgis.config.processes import RouterConfig
from tgis.net.addresses import AddressError, TcpAddress, configure_socket, parse_all
from tgis.net.framing import steps_path
from tgis.net.tls import Certificates, link_certificates, mutual_client_context

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]
TCP_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]

Stream = TypeVar("Stream", bound=asyncio.Protocol)


class ShardLink(Protocol):
    """Connection to every rank of a shard group."""

    severity: int
    """Log level of the message that a shard cannot be reached."""

    @property
    def names(self) -> list[str]:
        """Names of the shards, in rank order."""

    @property
    def is_stale(self) -> bool:
        """True if the certificates changed since the channels were opened."""

    def open_channels(self) -> list[grpc.aio.Channel]:
        """Open one channel per rank, for unary calls."""

    async def open_stream(self, rank: int, make: Callable[[], Stream]) -> Stream:
        """Open the step stream to a rank. Raises OSError."""

    async def watch(self) -> None:
        """Check periodically for changed certificates, if the link uses any."""


def open_link(config: RouterConfig) -> ShardLink:
    """Create the configured link. Raises AddressError and CertificateError."""
    if not config.shard_addresses:
        return UnixShardLink(config.shard_uds_path, config.num_shard)
    certificates = link_certificates(config, mutual_client_context)
    return TcpShardLink(_read_addresses(config.shard_addresses), certificates, config.link_server_name)


class UnixShardLink:
    severity = logging.DEBUG  # the launcher reports their failures
    is_stale = False

    def __init__(self, uds_path: str, num_shards: int) -> None:
        self.names = [f"{uds_path}-{rank}" for rank in range(num_shards)]

    def open_channels(self) -> list[grpc.aio.Channel]:
        return [grpc.aio.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS) for path in self.names]

    async def open_stream(self, rank: int, make: Callable[[], Stream]) -> Stream:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_unix_connection(make, steps_path(self.names[rank]))
        return stream

    async def watch(self) -> None:
        pass


class TcpShardLink:
    severity = logging.WARNING

    def __init__(
        self,
        find: Callable[[], list[TcpAddress]],
        certificates: Certificates,
        server_name: str | None = None,
    ) -> None:
        """Create a link to the addresses that `find` returns, which may change between calls. `server_name`
        is the name in the shards' certificates if it differs from their host name."""
        self._find = find
        self._certificates = certificates
        self._server_name = server_name
        self._presented = certificates.pem
        self._addresses = find()

    @property
    def names(self) -> list[str]:
        return [str(address) for address in self._addresses]

    @property
    def is_stale(self) -> bool:
        self._certificates.refresh()
        return self._certificates.pem is not self._presented

    def open_channels(self) -> list[grpc.aio.Channel]:
        try:
            self._addresses = self._find()
        except AddressError as error:
            logger.error("the new shard addresses are invalid; the router keeps the earlier ones: %s", error)
        self._certificates.refresh()
        pem = self._presented = self._certificates.pem
        own = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        named = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        options = [*TCP_OPTIONS, *named]
        return [grpc.aio.secure_channel(str(address), own, options) for address in self._addresses]

    async def open_stream(self, rank: int, make: Callable[[], Stream]) -> Stream:
        loop = asyncio.get_running_loop()
        host, port = self._addresses[rank].steps
        name = self._server_name or host
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, stream = await loop.create_connection(
                make, host, port, ssl=self._certificates.context, server_hostname=name
            )
        configure_socket(transport.get_extra_info("socket"))
        return stream

    async def watch(self) -> None:
        await self._certificates.watch()


def _read_addresses(text: str) -> Callable[[], list[TcpAddress]]:
    """Return a function that returns the addresses in `text`, or in the file that `text` names; none if the
    file does not exist. Raises AddressError."""
    if "/" not in text:
        addresses = parse_all(text)
        return lambda: addresses
    path = Path(text)
    return lambda: parse_all(path.read_text()) if path.is_file() else []
