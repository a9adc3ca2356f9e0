"""Low-level HTTP/2 connection that sends exactly the given frames, valid or not, for requests that no client
library would send."""

import socket
import struct
import time
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4  # identifier of a setting
TIMEOUT_S = 10.0


class Kind(IntEnum):
    """Frame types."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    length = struct.pack("!I", len(payload))[1:]
    return length + struct.pack("!BBI", kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    return frame(Kind.SETTINGS, b"".join(struct.pack("!HI", *pair) for pair in values))


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode headers as literals without a table."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(value: str) -> bytes:
    data = value.encode("latin-1")
    if (rest := len(data) - 127) < 0:
        return bytes([len(data)]) + data
    length = [127]
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*length, rest]) + data


def call_headers(path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the headers of a gRPC call; `more` replaces headers of the same name."""
    usual = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    usual |= {"content-type": "application/grpc", "te": "trailers"}
    return [*(usual | dict(more)).items()]


def message(data: bytes, compressed: bool = False) -> bytes:
    """Return the data with gRPC's message prefix."""
    return struct.pack("!BI", compressed, len(data)) + data


class Connection:
    """Connection that is closed at the end of its context."""

    def __init__(self, host: str, port: int, values: Iterable[tuple[int, int]] = ()) -> None:
        """Open a connection with settings `values`."""
        self.socket = socket.create_connection((host, port), TIMEOUT_S)
        self._received = b""
        self.send(PREFACE + settings(values))

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send data. Return True if the other end still accepts it."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def call(self, stream: int, path: str, data: bytes, *headers: tuple[str, str]) -> bool:
        """Send a complete request of a unary or streamed call."""
        block = header_block(call_headers(path, *headers))
        return self.send(
            frame(Kind.HEADERS, block, END_HEADERS, stream)
            + frame(Kind.DATA, message(data), END_STREAM, stream)
        )

    def frames(self, timeout_s: float = TIMEOUT_S) -> Iterator[Frame]:
        """Yield received frames until the other end closes or nothing arrives in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            while (result := self._next_frame()) is not None:
                yield result
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self.socket.settimeout(remaining)
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            self._received += data

    def _next_frame(self) -> Frame | None:
        if len(self._received) < 9:
            return None
        length = int.from_bytes(self._received[:3])
        if len(self._received) < 9 + length:
            return None
        kind, flags, stream = struct.unpack("!BBI", self._received[3:9])
        payload = self._received[9 : 9 + length]
        self._received = self._received[9 + length :]
        return Frame(kind, flags, stream & 0x7FFFFFFF, payload)
