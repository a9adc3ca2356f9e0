"""Attacks of a hostile client on a port with OpenAI's API, over plain sockets."""

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HOST, TIMEOUT_S = "127.0.0.1", 30.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESET = struct.pack("ii", 1, 0)


def head(path: str, *lines: str) -> bytes:
    usual = (f"POST {path} HTTP/1.1", "host: a", "content-type: application/json")
    return "\r\n".join((*usual, *lines, "", "")).encode()


def post(path: str, body: bytes) -> bytes:
    return head(path, f"content-length: {len(body)}") + body


def completion(**fields: Any) -> bytes:
    return post(COMPLETIONS, json.dumps({"prompt": "a girl", "max_tokens": 3} | fields).encode())


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@contextmanager
def connected(port: int, *data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), TIMEOUT_S) as end:
        with contextlib.suppress(OSError):  # the other end may close before all is sent
            for part in data:
                end.sendall(part)
        yield end


def status_of(port: int, *data: bytes) -> int:
    """Return the status of the answer, or 0 if the connection is closed without an answer."""
    with connected(port, *data) as end, contextlib.suppress(OSError):
        received = b""
        while b"\r\n" not in received and (more := end.recv(1 << 16)):
            received += more
        if match := re.match(rb"HTTP/1\.1 (\d{3}) ", received):
            return int(match[1])
    return 0


def cut(port: int, request: bytes, num_events: int) -> None:
    """Reset the connection after a number of events of the answer."""
    with connected(port, request) as end:
        received = b""
        while received.count(b"data: ") < num_events and (more := end.recv(1 << 12)):
            received += more
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def is_cut(end: socket.socket, timeout_s: float) -> bool:
    """Read from the connection. Return True if the other end closes it in time."""
    end.settimeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            if not end.recv(1 << 16):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False
