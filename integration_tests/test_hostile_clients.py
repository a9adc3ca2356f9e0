"""HTTP clients that are deliberately slow, many, or gone; a steady client beside them loses nothing."""

import contextlib
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, launch, serve
from integration_tests.support.steady_client import API, ask, beside_a_steady_client, wait_for_answers
from tests.support.accounts import scrape
from tests.support.processes import Service
from tests.support.router import http_attacks
from tests.support.router.http_attacks import COMPLETIONS, HOST, TIMEOUT_S, completion, connected, head

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.one_worker("a scrape must see the router whole"),
]

SLOW_READER_S, NUM_SLOW_READERS = 2.0, 50
SLOW_READERS = 'tgi_request_failure{err="slow_reader"}'
MANY, MANY_TOGETHER = 10_000, 1_000
NUM_DESCRIPTORS = 1_200
NUM_ASKING = 16
STREAM = {"max_tokens": 200, "ignore_eos": True, "stream": True}
FLAGS = ["--dtype", "float32", *API]


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Client]:
    yield from serve(model.directory, *FLAGS, "--slow-reader-timeout", str(SLOW_READER_S))


def drip(connections: list[socket.socket], data: bytes, pause_s: float = 0.2) -> int:
    """Send one byte at a time to all, until none accepts more; return how many accepted everything."""
    open_ones = set(connections)
    for i in range(len(data)):
        for end in list(open_ones):
            try:
                end.sendall(data[i : i + 1])
            except OSError:
                open_ones.remove(end)
        if not open_ones:
            break
        time.sleep(pause_s)
    return len(open_ones)


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (b"", head(COMPLETIONS, f"x-long: {'a' * 1000}")),
        (head(COMPLETIONS, "content-length: 1000"), b" " * 999),
    ],
    ids=["headers", "bodies"],
)
def test_slow_requests_end(client: Client, begin: bytes, rest: bytes) -> None:
    with beside_a_steady_client(client), contextlib.ExitStack() as stack:
        ends = [stack.enter_context(connected(client.service.http_port, begin)) for _ in range(100)]
        began = time.monotonic()
        assert drip(ends, rest) == 0
        assert time.monotonic() - began < 60


def test_slow_readers_end(client: Client) -> None:
    """Each client requests eight texts, and reads after the service has closed the connection."""
    has_waited = threading.Event()
    port = client.service.http_port
    with beside_a_steady_client(client), ThreadPoolExecutor(NUM_SLOW_READERS) as threads:
        num_before = scrape(client.service.http).get(SLOW_READERS, 0)
        answers = [threads.submit(read_late, port, has_waited) for _ in range(NUM_SLOW_READERS)]
        deadline = time.monotonic() + 90
        while scrape(client.service.http).get(SLOW_READERS, 0) < num_before + NUM_SLOW_READERS:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        has_waited.set()
        assert not [answer for answer in answers if b"[DONE]" in answer.result()]
        assert scrape(client.service.http)[SLOW_READERS] == num_before + NUM_SLOW_READERS


def read_late(port: int, has_waited: threading.Event) -> bytes:
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        end.settimeout(TIMEOUT_S)
        end.connect((HOST, port))
        end.sendall(completion(n=8, **STREAM))
        has_waited.wait()
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := end.recv(1 << 16):
                received += more
        return received


def test_ten_thousand_connections(client: Client) -> None:
    """At most a thousand connections are open at a time; a third send nothing, a third half a request, a
    third a request."""
    request = completion(max_tokens=1)
    parts = (b"", request[: len(request) // 2], request)
    with beside_a_steady_client(client) as seconds:
        for _ in range(MANY // MANY_TOGETHER):
            with contextlib.ExitStack() as stack:
                for i in range(MANY_TOGETHER):
                    stack.enter_context(connected(client.service.http_port, parts[i % 3]))
                wait_for_answers(seconds)


def test_many_that_leave_together(client: Client) -> None:
    port = client.service.http_port
    with beside_a_steady_client(client):
        for _ in range(5):
            with ThreadPoolExecutor(100) as threads:
                left = [threads.submit(http_attacks.cut, port, completion(**STREAM), 2) for _ in range(100)]
                for one in left:
                    one.result()


def test_more_connections_than_descriptors(model: Model) -> None:
    """Connections without a request, to both ports, leave file descriptors for connections with one."""
    command = ["launcher", "--model-name", str(model.directory), "--bind", "127.0.0.1", "--port", "0"]
    command += ["--grpc-port", "0", "--max-http-connections", "64", *FLAGS]
    few = ("prlimit", f"--nofile={NUM_DESCRIPTORS}", sys.executable)
    service = Service(command, python=few).wait_until_serving()
    client = Client(service)
    try:
        with beside_a_steady_client(client) as seconds, contextlib.ExitStack() as stack:
            for port in (service.http_port, service.grpc_port):
                for _ in range(NUM_DESCRIPTORS):
                    stack.enter_context(connected(port))
            wait_for_answers(seconds, 20)
    finally:
        client.channel.close()
        code = service.end()
    assert code == 0, service.output


def test_sigterm_under_load(model: Model) -> None:
    """Every response that begins is complete; later clients are refused."""
    service = launch(model.directory, *FLAGS).wait_until_serving()
    ask(service.http)
    is_ending, outcomes = threading.Event(), list[str]()
    with ThreadPoolExecutor(NUM_ASKING) as threads:
        asking = [
            threads.submit(ask_to_the_end, service.http_port, i % 2 == 0, is_ending, outcomes)
            for i in range(NUM_ASKING)
        ]
        deadline = time.monotonic() + 60
        while len(outcomes) < 2 * NUM_ASKING and time.monotonic() < deadline:
            time.sleep(0.01)
        is_ending.set()
        code = service.end()
        for one in asking:
            one.result()
    print(dict(Counter(outcomes)))
    assert code == 0, service.output
    assert outcomes.count("whole") > 2 * NUM_ASKING
    assert {*outcomes} <= {"whole", "503", "unanswered"}
    assert "Traceback" not in service.output


def ask_to_the_end(port: int, is_stream: bool, is_ending: threading.Event, outcomes: list[str]) -> None:
    """Send requests, each on a new connection, until none can be opened."""
    request = completion(**STREAM | {"max_tokens": 60, "stream": is_stream})
    request = request.replace(b"host:", b"connection: close\r\nhost:")
    while True:
        received = b""
        try:
            with connected(port, request) as end, contextlib.suppress(ConnectionResetError):
                while more := end.recv(1 << 16):
                    received += more
        except ConnectionRefusedError:
            return
        outcome = classify(received)
        assert is_ending.is_set() or outcome == "whole", received
        outcomes.append(outcome)


def classify(received: bytes) -> str:
    status, (head_, _, body) = received[9:12], received.partition(b"\r\n\r\n")
    if status != b"200":
        return status.decode() or "unanswered"
    length = re.search(rb"content-length: (\d+)", head_, re.IGNORECASE)
    is_whole = len(body) == int(length[1]) if length else body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    return "whole" if is_whole else f"broken: {received!r}"
