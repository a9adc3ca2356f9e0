"""Attacks a port with OpenAI's API while a gRPC client makes calls. The gRPC client must notice nothing, no
resources may remain in use, and the same process must serve afterwards."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.router.attacks import Bystander
from tests.support.router.grammars import DEEP_RULES, SLOW
from tests.support.router.http_attacks import (
    CHAT,
    COMPLETIONS,
    HOST,
    chunks,
    completion,
    connected,
    cut,
    head,
    is_cut,
    post,
    status_of,
)
from tests.support.router.http_port import get
from tests.support.router.messages import batch
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.router.router_usage import RouterProcesses
from tgis.net.http.connection_limits import PATIENCE_S
from tgis.pb import generation_pb2 as pb

LIMIT = 1 << 20  # maximum bytes of a body
MAX_CONNECTIONS = 64
GROWTH_MIB = 60
PIPES = 2  # pipes of another process that compiles constraints
SLOWEST_S = 60.0  # limit for the other client's calls, on a machine that others use too
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
STREAM = completion(stream=True, max_tokens=150, min_tokens=150, ignore_eos=True)
QUIET = {"tgi_open_descriptors": PIPES + 4.0}  # connections that are still being closed


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("abuse")
    (directory / "chat.jinja").write_text(TEMPLATE)
    flags = ["--http-api", "openai", "--max-http-connections", str(MAX_CONNECTIONS)]
    flags += ["--chat-template", str(directory / "chat.jinja"), "--slow-reader-timeout", "1"]
    setup = start_router(directory, 1, "--max-message-bytes", str(LIMIT), "--max-batch-size", "16", *flags)
    setup.stub.Generate(batch("a", decoding=pb.DecodingParameters(regex="a")))  # starts the compiler
    assert status_of(setup.service.http_port, completion()) == 200
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output
    assert "Unexpected" not in setup.service.output


@pytest.fixture(scope="module")
def baseline(router: Setup) -> Mapping[str, float]:
    return {name: value + QUIET.get(name, 0) for name, value in take_baseline(router.http).items()}


@pytest.fixture
def port(router: Setup) -> int:
    return router.service.http_port


@contextlib.contextmanager
def undisturbed(router: Setup, baseline: Mapping[str, float]) -> Iterator[None]:
    processes = RouterProcesses(router)
    before = processes.rss
    with Bystander(HOST, router.service.grpc_port) as bystander:
        yield
    assert bystander.lost == []
    assert bystander.slowest_s < SLOWEST_S
    assert_nothing_left(router.http, baseline, 20)
    assert processes.rss - before < GROWTH_MIB << 20
    assert status_of(router.service.http_port, completion()) == 200


def nested(depth: int, opening: str, closing: str) -> bytes:
    return post(COMPLETIONS, f'{{"prompt": {opening * depth}1{closing * depth}}}'.encode())


def guided(schema: object) -> bytes:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return completion(response_format=wanted)


CHUNKED = head(COMPLETIONS, "transfer-encoding: chunked")
HALVES = (b"", completion()[:20], head(COMPLETIONS, "content-length: 1000") + b'{"prom')
LONG_TEXT = json.dumps({"prompt": "a " * (LIMIT // 2 - 20)}).encode()
REQUESTS: dict[str, tuple[set[int], bytes]] = {
    "a text at the limit": ({400}, post(COMPLETIONS, LONG_TEXT)),
    "more than the limit": ({413}, post(COMPLETIONS, b" " * (LIMIT + 1))),
    "a length beyond the limit": ({413}, head(COMPLETIONS, "content-length: 99999999999")),
    "chunks beyond the limit": (
        {413},
        CHUNKED + chunks(b" " * (2 * LIMIT), 1 << 16),
    ),
    "a chunk beyond the limit": (
        {413, 400},
        CHUNKED + b"fffffff0\r\n" + b" " * (2 * LIMIT),
    ),
    "chunks of a byte": (
        {200},
        CHUNKED + chunks(b" " * 10_000 + b'{"prompt": "a", "max_tokens": 1}', 1),
    ),
    "a chunk of no length": ({400, 0}, CHUNKED + b"zz\r\n"),
    "two lengths": ({400, 0}, head(COMPLETIONS, "content-length: 2", "content-length: 3") + b"{}}"),
    "a length below 0": ({400, 0}, head(COMPLETIONS, "content-length: -1") + b"{}"),
    "a header of 100 KB": (
        {431, 400, 0},
        head(COMPLETIONS, "x: " + "y" * 100_000, "content-length: 2") + b"{}",
    ),
    "10,000 headers": ({431, 400, 0}, head(COMPLETIONS, *["x: y"] * 10_000)),
    "a line without an end": ({431, 400, 0}, b"GET /" + b"a" * 200_000),
    "no HTTP": ({400, 0}, b"\x16\x03\x01" + bytes(range(256)) * 40),
    "a NUL in a header": ({400, 0}, head(COMPLETIONS, "x: a\0b", "content-length: 2") + b"{}"),
    "deep lists": ({400}, nested(200_000, "[", "]")),
    "deep objects": ({400}, nested(100_000, '{"a":', "}")),
    "a deep schema": ({400}, nested(20_000, '{"items":', "}").replace(b'"prompt"', b'"guided_json"')),
    "no UTF-8": ({400}, post(COMPLETIONS, b'{"prompt": "\xff\xfe"}')),
    "half a surrogate": ({200, 400}, post(COMPLETIONS, b'{"prompt": "\\ud800", "max_tokens": 1}')),
    "a number beyond floats": ({400}, post(COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}')),
    "NaN": ({400}, post(COMPLETIONS, b'{"prompt": "a", "temperature": NaN}')),
    "an integer of 5,000 digits": (
        {400},
        post(COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}"),
    ),
    "many texts": ({400, 429}, completion(prompt=["a"] * 50_000)),
    "many choices": ({400, 429}, completion(n=1_000_000_000)),
    "an id beyond 64 bits": ({400}, completion(prompt=[1 << 70])),
    "an id below 0": ({400}, completion(prompt=[-1])),
    "many biases": ({400}, completion(logit_bias={str(i): 1 for i in range(50_000)})),
    "many stops": ({400}, completion(stop=["x"] * 50_000)),
    "no object": ({400}, post(COMPLETIONS, b"null")),
    "nothing": ({400}, post(CHAT, b"")),
    "a slow schema": ({400}, guided(SLOW)),
    "a schema of a megabyte": ({400, 413}, guided({"enum": ["x"] * 150_000})),
    "deep rules": ({400}, completion(guided_grammar=DEEP_RULES)),
    "a regex of parentheses": ({400}, completion(guided_regex="(" * 3_000 + ")" * 3_000)),
    "a remote schema": ({400}, guided({"$ref": "http://127.0.0.1:1/schema"})),
    "a method that is none": ({405, 404, 400, 0}, b"BREW /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n"),
}


def test_odd_requests(router: Setup, baseline: Mapping[str, float], port: int) -> None:
    """All requests run at once. Each gets its own status, and none takes time from the others."""
    with undisturbed(router, baseline), ThreadPoolExecutor(8) as threads:
        outcomes = dict(
            zip(REQUESTS, threads.map(lambda r: status_of(port, r[1]), REQUESTS.values()), strict=True)
        )
    assert {name: got for name, got in outcomes.items() if got not in REQUESTS[name][0]} == {}


def test_half_headers_use_up_no_port(router: Setup, baseline: Mapping[str, float], port: int) -> None:
    """The connections send nothing or half a header. They outnumber the places."""
    with undisturbed(router, baseline), contextlib.ExitStack() as ends:
        for i in range(4 * MAX_CONNECTIONS):
            ends.enter_context(connected(port, HALVES[i % 2]))
        assert get(router.http + "/health") == (200, "")
        assert status_of(port, completion()) == 200


def test_half_bodies_are_so_many(router: Setup, baseline: Mapping[str, float], port: int) -> None:
    """Probes are answered. After a second, half bodies make room for whole requests."""
    with undisturbed(router, baseline), contextlib.ExitStack() as ends:
        for _ in range(MAX_CONNECTIONS + 10):
            ends.enter_context(connected(port, HALVES[2]))
        assert get(router.http + "/health") == (200, "")
        time.sleep(PATIENCE_S + 0.2)
        assert [status_of(port, completion()) for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_streams_that_are_cut(router: Setup, baseline: Mapping[str, float], port: int, count: int) -> None:
    with undisturbed(router, baseline), ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: cut(port, STREAM, i % 7), range(count)))


def test_unread_streams(router: Setup, baseline: Mapping[str, float], port: int) -> None:
    with undisturbed(router, baseline), contextlib.ExitStack() as ends:
        for _ in range(8):
            ends.enter_context(connected(port, STREAM))
        time.sleep(1)


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_flood_of_requests(router: Setup, baseline: Mapping[str, float], port: int, seconds: int) -> None:
    """Many requests are refused as overload or closed to make room."""
    end = time.monotonic() + seconds

    def ask(_: int) -> set[int]:
        answers = set()
        while time.monotonic() < end:
            answers.add(status_of(port, completion(max_tokens=20)))
        return answers

    with undisturbed(router, baseline), ThreadPoolExecutor(16) as threads:
        statuses = set().union(*threads.map(ask, range(16)))
    assert 200 in statuses
    assert statuses <= {0, 200, 429}


@pytest.mark.slow
def test_half_a_request_is_cut_off(router: Setup, baseline: Mapping[str, float], port: int) -> None:
    with undisturbed(router, baseline), contextlib.ExitStack() as stack:
        ends = [stack.enter_context(connected(port, half)) for half in HALVES]
        with ThreadPoolExecutor(len(ends)) as threads:
            assert list(threads.map(lambda end: is_cut(end, 15), ends)) == [True] * len(ends)
