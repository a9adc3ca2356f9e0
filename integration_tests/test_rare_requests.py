"""HTTP requests in forms that are valid but rare, and invalid ones that proxies may read differently, all at
once; a steady client beside them loses nothing."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, serve
from integration_tests.support.steady_client import API, beside_a_steady_client
from tests.support.router.http_attacks import COMPLETIONS, status_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.one_worker("a scrape must see the router whole"),
]

NUM_ROUNDS, NUM_THREADS = 20, 16
BODY = json.dumps({"prompt": "a girl", "max_tokens": 3}).encode()
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
END = b"0\r\n\r\n"
LENGTH, CHUNKED = f"content-length: {len(BODY)}", "transfer-encoding: chunked"
H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQ")
WEBSOCKET = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13")


def head(target: str, *lines: str, method: str = "POST", version: str = "HTTP/1.1") -> bytes:
    usual = (f"{method} {target} {version}", "host: a", "content-type: application/json")
    return "\r\n".join((*usual, *lines, "", "")).encode()


REQUESTS: dict[str, tuple[int, bytes]] = {
    "h2c": (200, head(COMPLETIONS, *H2C, LENGTH) + BODY),
    "h2c with chunks": (400, head(COMPLETIONS, *H2C, CHUNKED) + CHUNK + END),
    "h2c without an upgrade": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"),
    "a web socket": (200, head(COMPLETIONS, *WEBSOCKET, LENGTH) + BODY),
    "a body that waits": (100, head(COMPLETIONS, "expect: 100-continue", LENGTH) + BODY),
    "a large body that waits": (
        413,
        head(COMPLETIONS, "expect: 100-continue", "content-length: 99999999999"),
    ),
    "TRACE": (405, head(COMPLETIONS, "cookie: secret", method="TRACE")),
    "CONNECT": (400, head("a:80", method="CONNECT")),
    "OPTIONS *": (404, head("*", method="OPTIONS")),
    "an absolute target": (200, head(f"http://a{COMPLETIONS}", LENGTH) + BODY),
    "a target with a name": (200, head(f"http://user:word@a:80{COMPLETIONS}", LENGTH) + BODY),
    "a host without a target": (400, head("http://a", LENGTH) + BODY),
    "extensions": (200, head(COMPLETIONS, CHUNKED) + CHUNK.replace(b"\r\n", b';a="b";c\r\n', 1) + END),
    "an extension of 100 kB": (
        431,
        head(COMPLETIONS, CHUNKED) + CHUNK.replace(b"\r\n", b";" + b"a" * 100_000 + b"\r\n", 1) + END,
    ),
    "an extension that ends in LF": (
        400,
        head(COMPLETIONS, CHUNKED) + CHUNK.replace(b"\r\n", b";a\n", 1) + END,
    ),
    "trailers": (200, head(COMPLETIONS, CHUNKED, "trailer: x-sum") + CHUNK + b"0\r\nx-sum: 1\r\n\r\n"),
    "a trailer with a length": (
        400,
        head(COMPLETIONS, CHUNKED) + CHUNK + b"0\r\ncontent-length: 5\r\n\r\n",
    ),
    "10,000 trailers": (431, head(COMPLETIONS, CHUNKED) + CHUNK + b"0\r\n" + b"x: y\r\n" * 10_000 + b"\r\n"),
    "chunks and a length": (400, head(COMPLETIONS, CHUNKED, LENGTH) + CHUNK + END),
    "no coding": (400, head(COMPLETIONS, "transfer-encoding: identity", LENGTH) + BODY),
    "a folded header": (400, head(COMPLETIONS, "x: a\r\n b", LENGTH) + BODY),
    "a space before the colon": (400, head(COMPLETIONS, "x : a", LENGTH) + BODY),
    "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "two hosts": (400, head("/health", "host: b", method="GET")),
    "HTTP/1.0": (200, head(COMPLETIONS, "connection: keep-alive", LENGTH, version="HTTP/1.0") + BODY),
}


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Client]:
    yield from serve(model.directory, "--dtype", "float32", *API)


def test_rare_requests(client: Client) -> None:
    port, names = client.service.http_port, [*REQUESTS] * NUM_ROUNDS
    with beside_a_steady_client(client), ThreadPoolExecutor(NUM_THREADS) as threads:
        statuses = [*threads.map(lambda name: status_of(port, REQUESTS[name][1]), names)]
    wrong = {(name, got) for name, got in zip(names, statuses, strict=True) if got != REQUESTS[name][0]}
    assert not wrong
