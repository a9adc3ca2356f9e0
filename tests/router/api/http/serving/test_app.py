"""Tests the router as an HTTP server for OpenAI's API, whatever the requests contain."""

import asyncio
import http.client
import json
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.accounts import assert_nothing_left, scrape, take_baseline
from tests.support.processes import Service
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.http_port import metric
from tests.support.router.router_process import (
    Setup,
    router_command,
    start_router,
    stop_router,
    write_usual,
)
from tests.support.tls_files import Files, issue
from tgis.net.ports import reserve
from tgis.router.api.http.json_structure import BodyLimits, check_structure
from tgis.router.errors import RequestError
from tgis.router.requests.shutdown import STOPPED

PATH = "/v1/completions"
MAX_BYTES, MAX_CONNECTIONS, SLOW_S = 1 << 16, 100, 0.5
TOKEN, OTHER = "token-of-a", "token-of-nobody"
GENERATE = {"prompt": "a b c", "max_tokens": 3}
LONG = {"prompt": "a b c", "max_tokens": 190, "ignore_eos": True}
CANCELLED = 'tgi_request_failure{err="cancelled"}'


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("router")
    (directory / "tokens").write_text(f"tenant team-a {TOKEN}\n{OTHER}\n")
    flags = ["--http-api", "openai", "--auth-tokens-path", str(directory / "tokens")]
    flags += ["--max-message-bytes", str(MAX_BYTES), "--max-http-connections", str(MAX_CONNECTIONS)]
    flags += ["--slow-reader-timeout", str(SLOW_S), "--cors-allow-origin", "https://a.example"]
    setup = start_router(directory, 1, *flags)
    ask(setup.service.http_port, GENERATE)
    baseline = take_baseline(setup.http)
    yield setup
    assert_nothing_left(setup.http, baseline)
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output


Answer = tuple[int, dict[str, str], Any]


def ask(
    port: int,
    body: Any = None,
    path: str = PATH,
    method: str = "POST",
    token: str = TOKEN,
    **headers: str,
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given |= {"authorization": f"Bearer {token}"} if token else {}
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection.request(method, path, data, given)
        return read(connection)
    finally:
        connection.close()


def read(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    text = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    is_json = headers.get("content-type") == "application/json"
    return response.status, headers, json.loads(text) if is_json else text


def error_of(answer: Answer) -> tuple[int, str]:
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


@contextmanager
def slow_steps(router: Setup, step_s: float) -> Iterator[None]:
    router.shards[0].step_s, usual = step_s, router.shards[0].step_s
    try:
        yield
    finally:
        router.shards[0].step_s = usual


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.005)
    return time.monotonic() - began


def open_stream(port: int, body: Any = None, receive_bytes: int = 0) -> socket.socket:
    """Return a connection whose stream has begun."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", port))
    data = json.dumps((body or LONG) | {"stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    connection.settimeout(10)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    with connection:
        while part := connection.recv(1 << 16):
            parts.append(part)
            if part.endswith(b"0\r\n\r\n"):
                break
    return b"".join(parts)


def test_all_routes_of_the_api_need_a_token(router: Setup) -> None:
    port = router.service.http_port
    name = 'tgi_request_failure{err="unauthenticated"}'
    before = metric(router, name)
    for path in (PATH, "/v1/models", "/v1/nothing", "/tokenize"):
        for token in ("", "wrong", TOKEN + "x"):
            answer = ask(port, GENERATE, path, token=token)
            assert error_of(answer) == (401, "a valid bearer token is required")
            assert answer[1]["www-authenticate"] == "Bearer"
    assert metric(router, name) == before + 12
    began = time.monotonic()
    for _ in range(200):
        ask(port, GENERATE, "/v1/nothing", token="")
    max_lines = time.monotonic() - began + 3
    router.service.wait_for_line("a call of /v1/completions was refused", 5)
    assert sum("was refused" in line for line in router.service.output.splitlines()) <= max_lines
    for path in ("/health", "/live", "/metrics"):
        assert ask(port, path=path, method="GET", token="")[0] == 200
    assert ask(port, GENERATE, token=OTHER)[0] == 200


def test_paths_and_methods(router: Setup) -> None:
    port = router.service.http_port
    assert error_of(ask(port, GENERATE, "/v1/nothing"))[0] == 404
    answer = ask(port, path=PATH, method="GET")
    assert error_of(answer)[0] == 405
    assert answer[1]["allow"] == "POST"
    assert ask(port, path="/nothing", method="GET")[0] == 404


def test_encoded_slashes_do_not_separate_parts_of_a_path(router: Setup) -> None:
    """A gateway that refuses some paths need not know that they have other forms."""
    port = router.service.http_port
    counted = 'tgi_http_api_request_count{api="openai",code="404",route="other"}'
    before = metric(router, counted)
    for path in ("/v1%2fcompletions", "/v1%2Fcompletions", "/v1%2fchat/completions", "/v1%2fmodels/a/b"):
        assert ask(port, GENERATE, path)[0] == 404
    assert metric(router, counted) == before + 4, "the log and the metrics do not name another path"
    assert ask(port, GENERATE, "/v1/%63ompletions")[0] == 200
    status, _, body = ask(port, path="/v1/models/of%2Fours", method="GET")
    assert (status, "of/ours" in body["error"]["message"]) == (404, True)


def test_request_ids_are_echoed_if_they_can_be_shown(router: Setup) -> None:
    port = router.service.http_port
    for path in (PATH, "/v1/nothing"):
        assert ask(port, GENERATE, path, x_request_id="an id-1")[1]["x-request-id"] == "an id-1"
        for bad in ("x" * 129, "é"):
            assert len(ask(port, GENERATE, path, x_request_id=bad)[1]["x-request-id"]) == 32


def test_cors_is_for_the_chosen_origin_and_the_api_only(router: Setup) -> None:
    port, allowed = router.service.http_port, "access-control-allow-origin"
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    preflight = ask(port, path=PATH, method="OPTIONS", token="", origin="https://a.example", **asked)
    assert (preflight[0], preflight[1][allowed]) == (200, "https://a.example")
    assert ask(port, GENERATE, origin="https://a.example")[1][allowed] == "https://a.example"
    assert allowed not in ask(port, GENERATE, origin="https://b.example")[1]
    assert allowed not in ask(port, path="/health", method="GET", origin="https://a.example")[1]


def test_large_requests_get_413_with_and_without_a_length(router: Setup) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", router.service.http_port, timeout=10)
    headers = {"authorization": f"Bearer {TOKEN}"}
    for chunked in (False, True):
        body = b'{"prompt": "' + b"a" * MAX_BYTES + b'"}'
        connection.request("POST", PATH, iter([body]) if chunked else body, headers, encode_chunked=chunked)
        assert error_of(read(connection)) == (413, f"the request has more than {MAX_BYTES} bytes")
        connection.request("POST", PATH, json.dumps(GENERATE), headers)  # on the same connection
        assert read(connection)[0] == 200
    connection.close()


def test_long_headers_get_431(router: Setup) -> None:
    """The connection, which knows no API, sends this answer."""
    status, headers, body = ask(router.service.http_port, GENERATE, x_long="a" * 20_000)
    assert (status, body) == (431, b"Request Header Fields Too Large")
    assert headers["content-type"].startswith("text/plain")


@pytest.mark.one_worker("each worker has a limit of its own for its connections")
def test_a_connection_above_the_limit_is_asked_to_retry(router: Setup) -> None:
    port = router.service.http_port
    half = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{{".encode()
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(half)
        wait_for(lambda: ask(port, GENERATE)[0] == 503)
        answer = ask(port, GENERATE)
    assert error_of(answer) == (503, "the service has too many connections")
    assert (answer[1]["retry-after"], answer[2]["error"]["type"]) == ("1", "service_unavailable_error")
    wait_for(lambda: ask(port, GENERATE)[0] == 200)


def test_deep_json_is_refused(router: Setup) -> None:
    status, message = error_of(ask(router.service.http_port, b'{"prompt": ' + b"[" * 5000))
    assert (status, message) == (400, "the JSON is nested more than 64 levels deep")


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("fill", [b"", b'"]]]{{{[\\"[[",', b"[],[],", b'{"a":[1]},'])
def test_depth_is_that_of_the_json(depth: int, fill: bytes) -> None:
    """The depth is the one that Python's own parser finds. Brackets in texts do not count."""
    body = b"[" + fill * 100 + b"[" * (depth - 1) + b"]" * (depth - 1) + b"]"
    if fill and depth == 1:
        body = b"[" + (fill * 100)[:-1] + b"]"
    expected = _depth(json.loads(body))
    if expected <= 64:
        check_structure(body, BodyLimits())
    else:
        with pytest.raises(RequestError):
            check_structure(body, BodyLimits())


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def test_depth_takes_linear_time() -> None:
    for body in (b"[" * (1 << 20), b"[]," * (1 << 18), b'"' * (1 << 20), b'["\\"]' * (1 << 17)):
        began = time.process_time()
        with suppress(RequestError):
            check_structure(body + b"[" * 65 + b"]", BodyLimits())
        assert time.process_time() - began < 1


def test_text_without_an_end_is_looked_at_once() -> None:
    """Scanning it repeatedly would take hours for these two megabytes."""
    body = b'"\\' * (1 << 20) + b"[" * 65
    check_structure(body, BodyLimits())
    with pytest.raises(RequestError):
        check_structure(b"[" * 65 + body, BodyLimits())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_is_cancelled_within_a_step(router: Setup, is_stream: bool) -> None:
    with slow_steps(router, 0.2):
        before = metric(router, CANCELLED)
        if is_stream:
            connection: Any = open_stream(router.service.http_port)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", router.service.http_port)
            connection.request("POST", PATH, json.dumps(LONG), {"authorization": f"Bearer {TOKEN}"})
            wait_for(lambda: scrape(router.http)["tgi_requests_running"] == 1)
        num_steps = router.shards[0].num_steps
        connection.close()
        wait_for(lambda: scrape(router.http)["tgi_requests_live"] == 0)
        assert router.shards[0].num_steps <= num_steps + 2  # one was in progress, one may have been sent
        assert metric(router, CANCELLED) == before + 1


def test_a_client_that_does_not_read_is_ended_as_slow(router: Setup) -> None:
    name = 'tgi_request_failure{err="slow_reader"}'
    before = metric(router, name)
    body = LONG | {"logprobs": 20, "n": 16, "temperature": 1, "stream_options": {"include_usage": True}}
    with slow_steps(router, 0.02):
        connection = open_stream(router.service.http_port, body, receive_bytes=2048)
        wait_for(lambda: metric(router, name) == before + 1, 15)
        connection.close()


def test_a_flood_is_refused_and_other_calls_succeed(router: Setup) -> None:
    """Some of 500 simultaneous requests are served, the others are refused, and probes are answered."""

    async def one(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(GENERATE).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        try:
            return int((await reader.readline()).split()[1])
        except (ConnectionResetError, IndexError):
            return 0
        finally:
            writer.close()

    async def flood() -> list[int]:
        return await asyncio.gather(*(one(router.service.http_port) for _ in range(500)))

    stream = open_stream(router.service.http_port)
    statuses = asyncio.run(flood())
    assert b"[DONE]" in rest_of(stream)
    assert set(statuses) <= {200, 429, 503}, statuses
    assert statuses.count(200) >= MAX_CONNECTIONS - 1
    assert ask(router.service.http_port, path="/health", method="GET")[0] == 200
    assert ask(router.service.http_port, GENERATE)[0] == 200


def test_an_api_that_is_not_chosen_says_how_to_choose_it(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1)
    try:
        for path in (PATH, "/v1/models", "/tokenize"):
            status, message = error_of(ask(setup.service.http_port, GENERATE, path, token=""))
            assert status == 404
            assert "--http-api openai" in message
    finally:
        assert stop_router(setup) == 0


def test_a_drain_finishes_active_calls_and_refuses_new_ones(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1, "--http-api", "openai")
    setup.shards[0].step_s = 0.01
    port = setup.service.http_port
    stream = open_stream(port)
    other = http.client.HTTPConnection("127.0.0.1", port)
    setup.service.process.send_signal(signal.SIGTERM)
    setup.service.wait_for_line("draining requests: 1, for at most 30 s (--shutdown-timeout)", 5)
    other.request("POST", PATH, json.dumps(GENERATE))
    answer = read(other)
    other.close()
    assert error_of(answer) == (503, "the service is shutting down")
    assert (answer[1]["connection"], answer[1]["retry-after"]) == ("close", "1")
    text = rest_of(stream)
    assert b'"finish_reason":"length"' in text
    assert b"error" not in text
    assert stop_router(setup) == 0


def test_a_drain_ends_long_calls_with_an_error(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1, "--http-api", "openai", "--shutdown-timeout", "0.5")
    setup.shards[0].step_s = 0.1
    stream = open_stream(setup.service.http_port)
    setup.service.process.send_signal(signal.SIGTERM)
    text = rest_of(stream)
    assert text.rstrip().endswith(b"0")
    assert b'data: {"error":{"message":"the service is shutting down"' in text
    assert b"data: [DONE]" in text
    assert stop_router(setup) == 0
    assert f"failed with UNAVAILABLE: {STOPPED}" in setup.service.output
    assert "CANCELLED" not in setup.service.output


def test_calls_while_the_model_loads_are_refused(tmp_path: Path) -> None:
    write_usual(tmp_path)
    port, uds_path = free_port(), str(tmp_path / "shard")
    flags = ["--shard-uds-path", uds_path, "--http-api", "openai", "--port", str(port)]
    service, servers = Service(router_command(tmp_path, *flags)), list[ShardServer]()
    try:
        wait_for(lambda: connects(port), 20)
        for method, path in (("POST", PATH), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/v1/no")):
            answer = ask(port, GENERATE, path, method, x_request_id="mine")
            assert error_of(answer) == (503, "the model is loading")
            assert answer[1]["x-request-id"] == "mine"
        servers.append(ShardServer(FakeShard(), uds_path))
        service.wait_until_serving(20)
        assert ask(port, GENERATE)[0] == 200
    finally:
        service.end()
        for server in servers:
            server.stop()


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def free_port() -> int:
    with reserve("127.0.0.1", 0) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def open_over_tls(port: int, files: Files, server: trustme.CA) -> Iterator[http.client.HTTPResponse]:
    """Start a long stream with a client certificate of `files`' authority, trusting the authority
    `server`."""
    context = ssl.create_default_context(cadata=server.cert_pem.bytes().decode())
    files.authority.issue_cert("client@example.com").configure_cert(context)
    connection = http.client.HTTPSConnection("localhost", port, timeout=10, context=context)
    with closing(connection):
        connection.request("POST", PATH, json.dumps(LONG | {"stream": True}))
        yield connection.getresponse()


def test_a_port_of_its_own_has_the_tls_of_grpc(tmp_path: Path) -> None:
    """With changed files, open connections continue, and new ones need the new files."""
    first, second = trustme.CA(), trustme.CA()
    mount, home, api_port = tmp_path / "mount", tmp_path / "home", free_port()
    mount.mkdir()
    home.mkdir()
    issue(first, mount)
    files, later = (Files(mount / "..data", authority) for authority in (first, second))
    flags = ["--http-api", "openai", "--http-api-port", str(api_port), *files.flags("cert", "key", "ca")]
    setup = start_router(home, 1, *flags)
    setup.shards[0].step_s = 0.005
    try:
        assert f"API on 127.0.0.1:{api_port}" in setup.service.output
        status, message = error_of(ask(setup.service.http_port, GENERATE, token=""))
        assert (status, "--http-api-port" in message) == (404, True)
        curl = ["curl", "-s", "--cacert", str(files.directory / "ca.pem"), "-d", json.dumps(GENERATE)]
        curl.append(f"https://localhost:{api_port}{PATH}")
        assert subprocess.run(curl, capture_output=True, timeout=10).returncode != 0  # without a certificate
        with open_over_tls(api_port, files, first) as stream:
            assert stream.readline().startswith(b"data: ")
            issue(second, mount)
            with open_over_tls(api_port, later, second) as renewed:
                assert renewed.status == 200
            for own, server in ((files, second), (later, first)):
                with pytest.raises(OSError, match=r"(?i)certificate|unknown ca|reset|closed|eof"):
                    open_over_tls(api_port, own, server).__enter__()
            assert stream.read().endswith(b"data: [DONE]\n\n")
        setup.service.wait_for_line("client@example.com", 5)
    finally:
        assert stop_router(setup) == 0
