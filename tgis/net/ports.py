"""Opens listening ports, with an error of one line if a port cannot be opened, and sets up connections."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.errors import OperatorError

MAX_UNSENT_BYTES = 128 << 10  # in the kernel, for a client that does not read
MAX_KEEPALIVE_S = 32_767  # the kernel refuses more


class PortError(OperatorError):
    """Error for a port that cannot be opened. It names the port, the address and the reason."""


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Return a listening TCP socket; 0: a free port. Raises PortError.

    Only processes of the same user share the port, and only if all of them ask for that."""
    with _one_line_error(host, port):
        return socket.create_server((host, port), family=_family(host, port), reuse_port=is_shared)


def reserve(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Return a TCP socket that is bound but refuses connections; 0: a free port. Raises PortError.

    One other socket, such as gRPC's, may still listen on the port. It may be shared as in `listen`."""
    with _one_line_error(host, port):
        reserved = socket.socket(_family(host, port))
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
            reserved.bind((host, port))
        except BaseException:
            reserved.close()
            raise
        return reserved


def keep_for_sharing(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound, refuses connections, and keeps the port for this user's processes
    that share it; 0: a free port. Raises PortError if any process has the port."""
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    kept = reserve(host, port, is_shared=True)
    # Otherwise a process that does not share the port could open it as long as nobody listens on it.
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return kept


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


@contextmanager
def _one_line_error(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]  # asyncio and socket repeat the address
        raise PortError(f"port {port} on {host} cannot be opened: {reason}") from error
    except UnicodeError as error:  # the host's name is invalid
        raise PortError(f"port {port} on {host} cannot be opened: the address is not valid") from error


def watch_peer(transport: asyncio.Transport, keepalive_s: float) -> None:
    """Let the kernel notice a client whose network is gone, and keep little for one that does not read."""
    connection = transport.get_extra_info("socket")
    idle_s, answer_s = (min(max(1, round(s)), MAX_KEEPALIVE_S) for s in (keepalive_s, keepalive_s / 3 / 4))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, answer_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
