"""Tests LMI's API in a router process from start to end: while the model loads, its logs, metrics and spans,
and during shutdown."""

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Service
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.http_port import metric
from tests.support.router.router_process import Setup, router_command, write_usual
from tests.support.trace_collector import Collector, values
from tgis.net.ports import reserve

PATH = "/invocations"
BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 3}}
LONG = {"inputs": "a b c", "parameters": {"max_new_tokens": 150, "ignore_eos_token": True}, "stream": True}


@pytest.fixture
def service(tmp_path: Path, collector: tuple[Collector, str]) -> Iterator[tuple[Service, int]]:
    """Yield a router whose shards are not ready, and its port."""
    write_usual(tmp_path)
    with reserve("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    flags = ["--shard-uds-path", str(tmp_path / "shard"), "--http-api", "lmi,tgi", "--json-output"]
    flags += [
        "--served-model-name",
        "m",
        "--otlp-endpoint",
        f"http://{collector[1]}",
        "--shutdown-timeout",
        "0.1",
    ]
    service = Service(router_command(tmp_path, *flags, "--port", str(port)))
    yield service, port
    service.end()


def ask(port: int, body: Any, path: str = PATH, method: str = "POST") -> tuple[int, Any]:
    connection, response = begin(port, body, path, method)
    with connection:
        return response.status, json.loads(response.read())


class Connection(http.client.HTTPConnection):
    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin(
    port: int, body: Any, path: str = PATH, method: str = "POST"
) -> tuple[Connection, http.client.HTTPResponse]:
    connection = Connection("127.0.0.1", port, timeout=10)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    return connection, connection.getresponse()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connects(port: int) -> bool:
    try:
        ask(port, BODY)
    except OSError:
        return False
    return True


def unavailable(message: str) -> tuple[int, dict[str, Any]]:
    return 503, {"code": 503, "type": "ServiceUnavailableException", "message": message}


@pytest.mark.slow
def test_a_router_from_its_start_to_its_end(
    service: tuple[Service, int], tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    process, port = service
    wait_for(lambda: connects(port))
    assert ask(port, None, "/ping", "GET") == (503, {"status": "Unhealthy"})
    assert ask(port, BODY) == ask(port, BODY, "/predictions/m") == unavailable("the model is loading")
    shard = FakeShard()
    server = ShardServer(shard, str(tmp_path / "shard"))
    try:
        process.wait_until_serving(20)
        assert ask(port, None, "/ping", "GET") == (200, {"status": "Healthy"})  # LMI's answer, not TGI's
        setup = Setup(process, [shard], [server], None, "", None)  # type: ignore[arg-type]
        check_observability(setup, port, collector[0])
        check_the_end(setup, port)
        setup.channel.close()
    finally:
        server.stop()


def check_observability(setup: Setup, port: int, collector: Collector) -> None:
    assert ask(port, BODY)[0] == 200
    assert ask(port, BODY, "/predictions/m/1")[0] == 200
    assert ask(port, {"inputs": "a", "parameters": {"num_beams": 2}})[0] == 424
    counted = 'tgi_http_api_request_count_total{{api="lmi",code="{}",route="{}"}}'
    assert metric(setup, counted.format(200, PATH)) == 1
    assert metric(setup, counted.format(200, "/predictions/{model:path}")) == 1
    assert metric(setup, counted.format(424, PATH)) == 1
    setup.shards[0].step_s = 0.05
    connection, response = begin(port, LONG)
    with connection:
        assert json.loads(response.readline())["token"]
        assert metric(setup, "tgi_http_api_active_streams") == 1
    setup.shards[0].step_s = 0.001
    wait_for(lambda: metric(setup, "tgi_http_api_active_streams") == 0)
    lines = [json.loads(line) for line in setup.service.output.splitlines() if line.startswith("{")]
    logged = [(line["method"], line.get("parameter")) for line in lines if line.get("api") == "lmi"]
    assert ("Invocation", None) in logged
    assert ("Prediction", None) in logged
    assert (PATH, "num_beams") in logged
    wait_for(lambda: len(collector.spans) >= 3)
    spans = {span.name: values(span.attributes) for span in collector.spans}
    assert spans["POST /predictions/{model}"]["http.response.status_code"] == 200


def check_the_end(setup: Setup, port: int) -> None:
    """A stream that outlives the drain ends with a line for the shutdown."""
    setup.shards[0].step_s = 0.05
    connection, response = begin(port, LONG)
    with connection:
        first = json.loads(response.readline())
        setup.service.process.send_signal(signal.SIGTERM)
        setup.service.wait_for_line("draining requests: 1", 5)
        assert ask(port, BODY) == unavailable("the service is shutting down")
        *lines, last = [json.loads(line) for line in response.read().splitlines()]
    assert last["token"]["id"] == -1
    assert last["token"]["error_msg"] == "the service is shutting down"
    assert last["details"] == {"finish_reason": "error"}
    assert last["generated_text"] == "".join(line["token"]["text"] for line in [first, *lines])
    assert setup.service.end() == 0
