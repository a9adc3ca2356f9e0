"""Opens listening ports, with one-line errors, and configures client connections."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.errors import OperatorError

MAX_UNSENT_BYTES = 128 << 10  # in the kernel's buffer, for a client that does not read
MAX_KEEPALIVE_S = 32_767  # the kernel refuses more
IN_USE = "; stop the process that uses it, or set another port"


class PortError(OperatorError):
    """Error for a port that cannot be opened; its text has the port, the address and the reason."""


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Return a listening TCP socket; port 0 chooses a free port. Raises PortError.

    Processes share the port only if they have the same user and all of them set `is_shared`."""
    with _one_line_error(host, port):
        return socket.create_server((host, port), family=_family(host, port), reuse_port=is_shared)


def reserve(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Return a TCP socket that is bound but refuses connections; port 0 chooses a free port. Raises
    PortError.

    One other socket, such as gRPC's, can still listen on the port. `is_shared` is as in `listen`."""
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


def reserve_for_sharing(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound, refuses connections, and reserves the port for processes of this
    user that share it; port 0 chooses a free port. Raises PortError if another process uses the port."""
    with listen(host, port) as probe:
        port = probe.getsockname()[1]
    reserved = reserve(host, port, is_shared=True)
    # Otherwise a process that does not share the port could open it while no process listens on it.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


@contextmanager
def _one_line_error(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]  # asyncio and socket repeat the address
        if error.errno == errno.EADDRINUSE:
            reason += IN_USE
        raise PortError(f"port {port} on {host} cannot be opened: {reason}") from error
    except UnicodeError as error:  # the host's name is invalid
        raise PortError(f"port {port} on {host} cannot be opened: the address is not valid") from error


def watch_peer(transport: asyncio.Transport, keepalive_s: float) -> None:
    """Detect a client whose network is lost, and bound the kernel's buffer for a client that does not
    read."""
    connection = transport.get_extra_info("socket")
    idle_s, answer_s = (min(max(1, round(s)), MAX_KEEPALIVE_S) for s in (keepalive_s, keepalive_s / 3 / 4))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, answer_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
