"""Where a shard answers its router: on Unix sockets that are this user's alone, or on TCP ports with mutual
TLS. A stream of steps is a socket either way, one that may be waited for with poll."""

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
from tgis.net.tls import Certificates, link_certificates
from tgis.net.tls_contexts import mutual_server
from tgis.shard.transport.tls_listener import Entrance as TlsEntrance

SEND_TIMEOUT = struct.pack("ll", 10, 0)  # seconds and microseconds


class SocketError(OperatorError):
    """The socket cannot be opened; the text is one line."""


class Connection(Protocol):
    """A router's stream of steps, as much of a socket as is needed."""

    def fileno(self) -> int: ...

    def recv(self, size: int, /) -> bytes:
        """Of what has arrived; nothing: it was closed. Raises BlockingIOError where it is too little to be
        read, and other OSErrors."""

    def sendall(self, data: bytes, /) -> None:
        """Raises OSError, also when too little is taken for too long."""

    def close(self) -> None: ...


class Entrance(Protocol):
    """Where routers' streams arrive."""

    def fileno(self) -> int:
        """Readable while one waits to be accepted."""

    def accept(self) -> Connection: ...


class Link(Protocol):
    name: str

    def open_steps(self) -> Entrance:
        """This and the next raise SocketError or PortError."""

    def open_calls(self, server: grpc.Server) -> None: ...


def choose_link(config: ShardConfig) -> Link:
    """Raises AddressError and CertificateError."""
    if not config.listen_address:
        return UnixLink(f"{config.uds_path}-{config.rank}")
    return TcpLink(parse(config.listen_address), link_certificates(config, mutual_server))


class UnixLink:
    def __init__(self, path: str) -> None:
        self.name = path

    def open_steps(self) -> Entrance:
        return UnixEntrance(steps_path(self.name))

    def open_calls(self, server: grpc.Server) -> None:
        with _private_socket(self.name):
            server.add_insecure_port(f"unix:{self.name}")


class UnixEntrance:
    def __init__(self, path: str) -> None:
        """Raises SocketError."""
        self._listener = socket.socket(socket.AF_UNIX)
        with _private_socket(path):
            self._listener.bind(path)
        self._listener.listen()

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> Connection:
        connection, _ = self._listener.accept()
        # A router that reads no answers must not keep its successor waiting for ever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
        return connection


class TcpLink:
    def __init__(self, address: TcpAddress, certificates: Certificates) -> None:
        self.name = str(address)
        self._address, self._certificates = address, certificates

    def open_steps(self) -> Entrance:
        return TlsEntrance(listen(*self._address.steps), self._certificates)

    def open_calls(self, server: grpc.Server) -> None:
        try:
            server.add_secure_port(self._address.calls, self._certificates.credentials())
        except RuntimeError as error:
            raise PortError(f"{self.name} cannot be opened; is it in use?") from error


@contextmanager
def _private_socket(path: str) -> Iterator[None]:
    """What is bound meanwhile is this user's alone, and nothing is there before. Raises SocketError."""
    Path(path).unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise SocketError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)
