"""Random data for connections to an HTTP port, from a grammar of valid and invalid requests, randomly cut."""

import random
from collections.abc import Iterator

TARGETS = (
    *("/echo", "/none", "/echo?a=%ff", "*", "/", "http://a/echo", "/" + "a" * 300, "/%zz", "", "a b", "/é"),
)
METHODS = ("GET", "POST", "HEAD", "PUT", "CONNECT", "OPTIONS", "TRACE", "PRI", "G@T", "", "get", "BREW")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.1 x", "HTP/1.1", "")
LENGTHS = (
    *("0", "3", "5", "00003", "0" * 4500 + "3", "9" * 5000, "-1", "+3", "3, 3", "0x3", "1e3", "", " 3"),
    "\u0663",
)
HEADERS = (
    *("host: a", "Host: a", "host:", "x: " + "y" * 200, "x:y", "x : y", ": y", "no colon", "x: a\x00b"),
    *("connection: close", "connection: keep-alive", "connection: upgrade", "upgrade: x", "upgrade: h2c"),
    *("transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "transfer-encoding: identity"),
    *("expect: 100-continue", "expect: x", "content-type: application/json", "te: trailers", "trailer: x"),
    "\tfold: a",
)
CHUNKS = (
    *("3\r\nabc\r\n", "0\r\n\r\n", "0\r\nx: y\r\n\r\n", "3;a=b\r\nabc\r\n", "fffffffffffffffff\r\n"),
    *("-1\r\n", "3\nabc\n", "g\r\n"),
)
OTHERS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),
    b"\r\n\r\n\r\n",
    b"\0" * 64,
    b"GET / HTTP/1.1\n\n",
    b"GET /echo HTTP/1.1\nhost: a\n\n",
    b"\xff\xfe" * 40,
    b"SSH-2.0-a\r\n",
)
UPGRADE = b"host: a\r\nconnection: upgrade\r\nupgrade: x\r\n"


def connection(r: random.Random) -> bytes:
    """Return the data of one client."""
    parts = [
        _request(r) if r.random() < 0.85 else r.choice(OTHERS) for _ in range(r.choice((1, 1, 2, 3, 30)))
    ]
    data = bytearray(b"".join(parts))
    if data and r.random() < 0.2:
        for _ in range(r.randint(1, 3)):
            data[r.randrange(len(data))] = r.randrange(256)
    return bytes(data[: r.randrange(len(data) + 1)] if r.random() < 0.2 else data)


def cuts(r: random.Random, data: bytes) -> Iterator[bytes]:
    """Split the data into at most about thirty parts."""
    size = r.choice((1 << 20, 1000, 50, 5, 1))
    size = max(size, len(data) // 30)
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _request(r: random.Random) -> bytes:
    if r.random() < 0.4:
        return _good_request(r)
    line = f"{r.choice(METHODS)} {r.choice(TARGETS)} {r.choice(VERSIONS)}"
    headers = r.sample(HEADERS, r.randint(0, 5))
    if r.random() < 0.7:
        headers.append("host: a")
    if r.random() < 0.5:
        headers.append(f"content-length: {r.choice(LENGTHS)}")
    r.shuffle(headers)
    end = r.choice(("\r\n", "\r\n", "\r\n", "\n", "\r"))
    body = (
        "".join(r.choices(CHUNKS, k=r.randint(0, 3))) if r.random() < 0.5 else r.choice(("", "abc", "abcde"))
    )
    return (end.join([line, *headers, "", ""]) + body).encode()


def _good_request(r: random.Random) -> bytes:
    return r.choice(
        (
            b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n",
            b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc",
            b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"GET /echo HTTP/1.1\r\n" + UPGRADE + b"\r\n",
            b"POST /echo HTTP/1.1\r\n" + UPGRADE + b"content-length: 3\r\n\r\nabc",
        )
    )
