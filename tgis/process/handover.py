"""Hands options and open descriptors over to a process that has already started."""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tgis.errors import OperatorError

MAX_FDS = 1
_READ_BYTES = 1 << 16


class HandoverError(OperatorError):
    """Error when the other process has ended before it has sent anything."""


def send_options(connection: socket.socket, options: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send options, whose values have JSON types, and up to MAX_FDS descriptors. Raises OSError."""
    content = json.dumps(options).encode()
    sent = socket.send_fds(connection, [content], fds)
    connection.sendall(content[sent:])
    connection.shutdown(socket.SHUT_WR)


def receive_options(fd: int) -> tuple[dict[str, Any], list[int]]:
    """Wait for the options and the descriptors on the socket `fd`, and close it. Raises HandoverError."""
    with socket.socket(fileno=fd) as connection:
        content, fds, _, _ = socket.recv_fds(connection, _READ_BYTES, MAX_FDS)
        while chunk := connection.recv(_READ_BYTES):
            content += chunk
    if not content:
        raise HandoverError("the launcher ended before it had sent the options of this process")
    options: dict[str, Any] = json.loads(content)
    return options, fds
