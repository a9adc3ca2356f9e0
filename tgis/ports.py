"""Opening a listening port, or saying in one line why it cannot be opened."""

import socket

from tgis.errors import OperatorError


class PortError(OperatorError):
    """Names the port, the address and the reason."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket that no other process shares; port 0 takes a free one. Raises PortError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]  # asyncio and socket add the address once more
        raise PortError(f"port {port} on {host} cannot be opened: {reason}") from error
