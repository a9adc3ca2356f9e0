"""Tests logs, traces and metrics of a router with OpenAI's API that logs everything, under hostile
requests."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.trace_collector import PARENT_ID, TRACEPARENT, Collector, values

MARK = "mArKeD"
TOKEN = f"token-{MARK}"
HEADERS = {
    "authorization": f"Bearer {TOKEN}",
    "content-type": "application/json",
    "x-api-key": MARK,
    "cookie": MARK,
    "traceparent": TRACEPARENT,
}
PATH = "/v1/completions"


@pytest.fixture
def setup(tmp_path: Path, collector: tuple[Collector, str]) -> Iterator[Setup]:
    (tmp_path / "tokens").write_text(f"tenant team-7 {TOKEN}\n")
    flags = ["--log-level", "debug", "--json-output", "--http-api", "openai"]
    flags += ["--auth-tokens-path", str(tmp_path / "tokens"), "--otlp-endpoint", f"http://{collector[1]}"]
    setup = start_router(tmp_path, 1, *flags)
    yield setup
    stop_router(setup)


def connect(setup: Setup) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(setup.http.removeprefix("http://"), timeout=20)


def ask(setup: Setup, body: str | bytes, path: str = PATH, **headers: str) -> tuple[int, str]:
    connection = connect(setup)
    try:
        connection.request("POST", path, body, HEADERS | headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(setup: Setup) -> dict[str, float]:
    connection = connect(setup)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hostile() -> list[tuple[int, str | bytes]]:
    """Return statuses and bodies. The bodies have marks where an error might quote them."""
    bodies = [
        f'{{"prompt": "{MARK}',
        json.dumps({"prompt": MARK, "max_tokens": MARK}),
        json.dumps({"prompt": MARK, "stop": [MARK] * 99}),
        json.dumps({"prompt": MARK, "stop": {MARK: 1}}),
        json.dumps({"prompt": {MARK: MARK}}),
        json.dumps({"prompt": MARK, "logit_bias": {MARK: 1}}),
        json.dumps({"prompt": MARK, "logprobs": 5000}),
        json.dumps({"prompt": MARK, "suffix": MARK}),
        json.dumps({"prompt": MARK * 500}),
        '[{"' + MARK + '": ' * 1 + "[" * 200,
    ]
    return [*((400, body) for body in bodies), (400, MARK.encode() + b"\xff")]


def lines_of(setup: Setup) -> list[dict[str, object]]:
    objects = (json.loads(line) for line in setup.service.output.splitlines() if line.startswith("{"))
    return [line for line in objects if line.get("api") == "openai"]


def test_a_call_and_its_refusals_are_seen_without_their_texts(
    setup: Setup, collector: tuple[Collector, str]
) -> None:
    fields = {"prompt": f"girl {MARK}", "max_tokens": 3, "model": "", "user": MARK, "cache_salt": MARK}
    good = json.dumps(fields)
    status, answer = ask(setup, good, **{"x-request-id": "request-1"})
    assert status == 200, answer
    refused = [(expected, *ask(setup, body, **{"x-request-id": "bad"})) for expected, body in hostile()]
    assert [(status, text) for expected, status, text in refused if status != expected] == []
    assert ask(setup, good, authorization=f"Bearer {TOKEN}x")[0] == 401
    assert ask(setup, good, f"/v1/{MARK}")[0] == 404
    seen = scrape(setup)
    family = "tgi_http_api_request_count_total{"
    assert {name: value for name, value in seen.items() if name.startswith(family)} == {
        f'tgi_http_api_request_count_total{{api="openai",code="{code}",route="{route}"}}': value
        for code, route, value in (
            (200, PATH, 1),
            (400, PATH, len(refused)),
            (401, PATH, 1),
            (404, "other", 1),
        )
    }
    assert seen['tgi_request_count_total{kind="single"}'] >= 1
    wait_until(lambda: len(collector[0].spans) >= 2)
    stop_router(setup)
    lines = lines_of(setup)
    [entry] = [line for line in lines if line["correlation_id"] == "request-1"]
    assert (entry["method"], entry["tenant"], entry["output_tokens"]) == ("Completion", "team-7", 3)
    assert sum(line["correlation_id"] == "bad" for line in lines) == len(refused), "one line for each"
    told_spans = [(span, values(span.attributes)) for span in collector[0].spans]  # from routers in any order
    [(span, attributes)] = [entry for entry in told_spans if entry[1]["http.response.status_code"] == 200]
    assert (span.name, span.parent_span_id.hex()) == (f"POST {PATH}", PARENT_ID)
    assert attributes["http.route"] == PATH
    assert attributes["gen_ai.operation.name"] == "text_completion"
    spans = repr([request.SerializeToString() for request in collector[0].requests])
    for shown in (setup.service.output, spans, repr(seen)):
        assert MARK not in shown.replace(f"/v1/{MARK}", "")


def test_streams_count_while_they_are_open(setup: Setup) -> None:
    setup.shards[0].step_s = 0.05
    body = json.dumps({"prompt": "girl", "stream": True, "max_tokens": 150, "ignore_eos": True})
    names = ("tgi_http_api_active_streams", "tgi_http_api_connections")

    def count() -> list[float]:
        seen = scrape(setup)
        return [seen[name] for name in names]

    streams = [connect(setup) for _ in range(2)]
    for stream in streams:
        stream.request("POST", PATH, body, HEADERS)
        assert stream.getresponse().status == 200
    assert count() == [2, 2]
    for stream in streams:
        assert stream.sock is None or stream.sock.close() is None
        stream.close()
    setup.shards[0].step_s = 0.001
    wait_until(lambda: count() == [0, 0])


def test_probes_have_no_line(setup: Setup) -> None:
    connection = connect(setup)
    for path in ("/health", "/live", "/metrics"):
        connection.request("GET", path)
        response = connection.getresponse()
        assert (response.status, response.read() is None) == (200, False)
    connection.close()
    stop_router(setup)
    assert lines_of(setup) == []
    assert not any(path in setup.service.output for path in ("/health", "/live", "/metrics"))
