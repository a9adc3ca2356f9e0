"""Opens the shard's end of the router connection: private Unix sockets, or TCP ports with mutual TLS."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import grpc

from tgis.config.processes import ShardConfig
from tgis.errors import OperatorError
from tgis.net.addresses import TcpAddress, parse
from tgis.net.framing import steps_path
from tgis.net.ports import PortError, listen
from tgis.net.tls import Certificates, link_certificates, mutual_server_context
from tgis.shard.transport.tls_listener import TlsListener

SEND_TIMEOUT = struct.pack("ll", 10, 0)  # seconds and microseconds


class SocketError(OperatorError):
    """Error when a socket cannot be opened."""


class StepConnection(Protocol):
    """Stream of steps from the router. Its file descriptor works with poll."""

    def fileno(self) -> int: ...

    def recv(self, size: int, /) -> bytes:
        """Return the bytes that have arrived, empty if the stream has ended. Raises OSError.

        BlockingIOError means that no complete data has arrived yet."""

    def sendall(self, data: bytes, /) -> None:
        """Send all of `data`. Raises OSError, also if the router reads too slowly."""

    def close(self) -> None: ...


class UnixListener:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        with _private_socket(path):
            self._listener.bind(path)
        self._listener.listen()

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> StepConnection:
        connection, _ = self._listener.accept()
        # A router that reads no answers must not block the next router for ever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
        return connection


# Listener for step streams. Its `fileno` is readable while a stream waits to be accepted.
StepListener = UnixListener | TlsListener


class UnixEndpoint:
    def __init__(self, path: str) -> None:
        self.name = path

    def open_steps(self) -> StepListener:
        return UnixListener(steps_path(self.name))

    def open_calls(self, server: grpc.Server) -> None:
        with _private_socket(self.name):
            server.add_insecure_port(f"unix:{self.name}")


class TcpEndpoint:
    def __init__(self, address: TcpAddress, certificates: Certificates) -> None:
        self.name = str(address)
        self._address = address
        self._certificates = certificates

    def open_steps(self) -> StepListener:
        return TlsListener(listen(*self._address.steps), self._certificates)

    def open_calls(self, server: grpc.Server) -> None:
        try:
            server.add_secure_port(str(self._address), self._certificates.credentials())
        except RuntimeError as error:
            raise PortError(f"{self.name} cannot be opened; is it in use?") from error


# Shard's end of the connection to its router. The methods raise SocketError or PortError.
Endpoint = UnixEndpoint | TcpEndpoint


def choose_endpoint(config: ShardConfig) -> Endpoint:
    """Return the configured endpoint. Raises AddressError and CertificateError."""
    if not config.listen_address:
        return UnixEndpoint(f"{config.uds_path}-{config.rank}")
    return TcpEndpoint(parse(config.listen_address), link_certificates(config, mutual_server_context))


@contextmanager
def _private_socket(path: str) -> Iterator[None]:
    """Make a socket that is bound to `path` in this context private to this user. Raises SocketError."""
    Path(path).unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise SocketError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)
