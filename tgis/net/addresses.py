"""Parses TCP addresses of shards: calls use one port, steps the next one, both with mutual TLS."""

import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from tgis.errors import OperatorError

MAX_PORT = 65534  # the next port is used too
# TCP keepalive settings, to detect a lost peer or network.
IDLE_S = 5
PROBE_S = 2
NUM_PROBES = 5
UNANSWERED_S = 30

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s\[\]:/,]+)):(\d{1,5})")


class AddressError(OperatorError):
    """Error for an invalid address; its text is one line."""


@dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    @property
    def steps(self) -> tuple[str, int]:
        return self.host, self.port + 1

    def __str__(self) -> str:
        """Return the address of the port for calls, in gRPC's notation."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> TcpAddress:
    """Parse `HOST:PORT`, where an IPv6 address is in brackets. Raises AddressError."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 0 < int(match[3]) <= MAX_PORT:
        raise AddressError(f"{text!r} is not HOST:PORT with a port from 1 to {MAX_PORT}")
    return TcpAddress(match[1] or match[2], int(match[3]))


def parse_all(text: str) -> list[TcpAddress]:
    """Parse addresses separated by commas. Raises AddressError, also for a duplicate address."""
    addresses = [parse(part) for part in text.split(",")]
    if len(set(addresses)) < len(addresses):
        raise AddressError(f"{text!r} contains an address twice")
    return addresses


def local_host(bind: str) -> str:
    """Return the address to connect to on this machine for a service that listens on `bind`."""
    try:
        address = ip_address(bind)
    except ValueError:
        return bind  # a host name
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return bind


def http_url(host: str, port: int, is_tls: bool) -> str:
    quoted = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{quoted}:{port}"


def configure_socket(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, and turn on keepalive to detect a lost peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)
