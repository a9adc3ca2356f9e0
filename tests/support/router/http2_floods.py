"""Attacks on the gRPC port with valid frames in numbers that no client sends, as functions of host, port and
count. Each ends when the other end has closed the connection or answered everything."""

import struct
import time
from collections.abc import Callable, Iterator

from tests.support.router.attacks import HEALTH, LISTEN_S, SERVICE
from tests.support.router.http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    Connection,
    Kind,
    call_headers,
    frame,
    header_block,
    message,
)
from tgis.pb import generation_pb2 as pb

Flood = Callable[[str, int, int], None]
CHECK, STREAM = HEALTH + "Check", SERVICE + "GenerateStream"
TOGETHER = 100  # streams that are open at the same time
ANSWERS_S = 60.0
HOLD_S = 3.0  # time for which streams are left open
LARGEST_WINDOW = struct.pack("!I", (1 << 31) - 1 - 65_535)
FRAME_BYTES = 16_384
TABLE_ENTRY = 62  # index of the newest entry of the dynamic table
REQUEST = pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a girl")).SerializeToString()


def _connect(host: str, port: int, window: int | None = None) -> Connection:
    """Connect with the greatest window for the connection, and one for each stream."""
    connection = Connection(host, port, [] if window is None else [(INITIAL_WINDOW_SIZE, window)])
    connection.send(frame(Kind.SETTINGS, flags=ACK) + frame(Kind.WINDOW_UPDATE, LARGEST_WINDOW))
    return connection


def _send_all(connection: Connection, parts: Iterator[bytes]) -> None:
    for part in parts:
        if not connection.send(part):
            break
    for _ in connection.frames(LISTEN_S):
        pass


def streams_in_turn(host: str, port: int, count: int) -> None:
    """Make `count` calls on one connection. All must be answered."""
    with _connect(host, port) as connection:
        for first in range(0, count, TOGETHER):
            streams = {2 * (first + i) + 1 for i in range(TOGETHER)}
            for stream in sorted(streams):
                assert connection.call(stream, CHECK, b"")
            for each in connection.frames(ANSWERS_S):
                if each.kind == Kind.HEADERS and each.flags & END_STREAM:
                    streams.remove(each.stream)
                if not streams:
                    break
            assert not streams, "streams without an answer"


def unfinished_requests(host: str, port: int, count: int) -> None:
    """Open streams with much metadata and a part of a message, and leave them open."""
    block = header_block(call_headers(SERVICE + "Generate", *((f"x-{i}", "y" * 900) for i in range(7))))
    with _connect(host, port) as connection:
        for stream in range(1, 2 * count, 2):
            connection.send(frame(Kind.HEADERS, block, END_HEADERS, stream))
            connection.send(frame(Kind.DATA, message(REQUEST)[:9], 0, stream))
        for _ in connection.frames(HOLD_S):
            pass


def zero_windows(host: str, port: int, count: int) -> None:
    """Request streams of tokens, but admit no byte of them."""
    with _connect(host, port, window=0) as connection:
        for stream in range(1, 2 * count, 2):
            connection.call(stream, STREAM, REQUEST)
        for _ in connection.frames(HOLD_S):
            pass


def windows_of_a_byte(host: str, port: int, count: int) -> None:
    """Admit a stream of tokens byte by byte."""
    with _connect(host, port, window=0) as connection:
        connection.call(1, STREAM, REQUEST)
        _send_all(connection, (frame(Kind.WINDOW_UPDATE, b"\0\0\0\1", 0, 1) for _ in range(count)))


def header_bomb(host: str, port: int, count: int) -> None:
    """Repeat one header of a kilobyte by references of a byte each, in ten calls."""
    literal = b"\x40" + header_block([("x", "y" * 1000)])[1:]  # enters the dynamic table
    block = header_block(call_headers(SERVICE + "Generate")) + literal + bytes([0x80 | TABLE_ENTRY]) * count

    def parts() -> Iterator[bytes]:
        for stream in range(1, 20, 2):
            pieces = [block[i : i + FRAME_BYTES] for i in range(0, len(block), FRAME_BYTES)]
            for i, piece in enumerate(pieces):
                kind = Kind.CONTINUATION if i else Kind.HEADERS
                yield frame(kind, piece, END_HEADERS if i == len(pieces) - 1 else 0, stream)

    with _connect(host, port) as connection:
        _send_all(connection, parts())


def empty_frames(host: str, port: int, count: int) -> None:
    """Send empty parts of a message, and empty parts of a header block."""
    block = header_block(call_headers(SERVICE + "Generate"))
    with _connect(host, port) as connection:
        connection.send(frame(Kind.HEADERS, block, END_HEADERS, 1))
        _send_all(connection, (frame(Kind.DATA, b"", 0, 1) for _ in range(count)))
    with _connect(host, port) as connection:
        connection.send(frame(Kind.HEADERS, block, 0, 1))
        _send_all(connection, (frame(Kind.CONTINUATION, b"", 0, 1) for _ in range(count)))


def priorities(host: str, port: int, count: int) -> None:
    """Build a tree of streams that are never opened."""
    with _connect(host, port) as connection:
        _send_all(
            connection,
            (frame(Kind.PRIORITY, struct.pack("!IB", 2 * i + 1, 9), 0, 2 * i + 3) for i in range(count)),
        )


def connections_in_turn(host: str, port: int, count: int) -> None:
    """Make `count` connections, each with a call that is answered or cut."""
    for i in range(count):
        with _connect(host, port) as connection:
            connection.call(1, CHECK if i % 2 else STREAM, b"" if i % 2 else REQUEST)
            next(connection.frames(1.0), None)


def slow_preface(host: str, port: int, count: int) -> None:
    """Send the settings of `count` connections in two halves, with a pause between them."""
    data = frame(Kind.SETTINGS, struct.pack("!HI", 3, 100) * 100)
    connections = [Connection(host, port) for _ in range(count)]
    for connection in connections:
        connection.send(data[:100])
    time.sleep(1)
    for connection in connections:
        connection.send(data[100:])
        connection.socket.close()


FLOODS: dict[str, tuple[Flood, int]] = {
    each.__name__: (each, count)
    for each, count in (
        (streams_in_turn, 10_000),
        (unfinished_requests, 3_000),
        (zero_windows, 300),
        (windows_of_a_byte, 20_000),
        (header_bomb, 60_000),
        (empty_frames, 50_000),
        (priorities, 50_000),
        (connections_in_turn, 500),
        (slow_preface, 300),
    )
}
"""Attacks by name, each with its count."""
