"""Opening a listening port, or saying in one line why it cannot be opened."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.errors import OperatorError


class PortError(OperatorError):
    """Names the port, the address and the reason."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket that no other process shares; port 0 takes a free one. Raises PortError."""
    with _one_line_error(host, port):
        return socket.create_server((host, port), family=_family(host, port))


def reserve(host: str, port: int) -> socket.socket:
    """A TCP socket that has the port without listening: who connects is refused, and who comes to listen,
    gRPC for one, may do so as long as nobody else does; port 0 takes a free one. Raises PortError."""
    with _one_line_error(host, port):
        reserved = socket.socket(_family(host, port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
        return reserved


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


@contextmanager
def _one_line_error(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]  # asyncio and socket add the address once more
        raise PortError(f"port {port} on {host} cannot be opened: {reason}") from error
    except UnicodeError as error:  # of a name that no host can have
        raise PortError(f"port {port} on {host} cannot be opened: that is no address") from error
