"""Event loop of a process that serves gRPC. grpc.aio's own thread writes a byte to a socket for every
operation that completes, and its reader takes one byte in a turn of the loop, but all operations in the first
of these turns. So a step that writes to many streams would be followed by as many turns that find nothing."""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

COMPLETIONS_READER = "_handle_events"
"""Name of grpc.aio's reader. Where it is called otherwise, all turns take place."""
MAX_WAKE_UPS = 4096


class GrpcEventLoop(uvloop.Loop):  # type: ignore[misc]  # mypy reads no types of uvloop's
    def add_reader(self, fileobj: Any, callback: Callable[..., Any], *args: Any) -> None:
        is_grpc = isinstance(callback, partial) and callback.func.__name__ == COMPLETIONS_READER
        if is_grpc and isinstance(fileobj, socket.socket):
            super().add_reader(fileobj, _take_together(fileobj, partial(callback, *args)))
        else:
            super().add_reader(fileobj, callback, *args)


def _take_together(wake_ups: socket.socket, read_completions: Callable[[], Any]) -> Callable[[], None]:
    """Return a reader that leaves one of the bytes to `read_completions`. Bytes are taken before the
    operations that they stand for, so that none waits without a byte."""

    def read() -> None:
        num_bytes = len(wake_ups.recv(MAX_WAKE_UPS, socket.MSG_PEEK))
        if num_bytes > 1:
            wake_ups.recv(num_bytes - 1)
        read_completions()

    return read
