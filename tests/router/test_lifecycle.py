"""Checks a router from start to end: the health that clients see, and the fate of their requests."""

import contextlib
import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import Service
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.http_port import get, metric
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import (
    MAX_SEQUENCE_LENGTH,
    Setup,
    restart_shards,
    start_router,
    stop_router,
    write_usual,
)
from tests.support.router.streams import Streams
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.router.api.grpc import health
from tgis.router.api.grpc.health import Health
from tgis.router.requests.shutdown import STOPPED

SERVING, NOT_SERVING, SERVICE_UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)
NAME = "fmaas.GenerationService"
# The documented settings for clients of several replicas.
SERVICE_CONFIG = Path(__file__).parents[2] / "deployment" / "client" / "service-config.json"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Setup]:
    setup = start_router(tmp_path, 1, "--max-concurrent-requests", "4")
    yield setup
    stop_router(setup)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_clients_are_refused_while_the_model_loads(tmp_path: Path) -> None:
    """Check that clients are refused, so that they can try another replica instead of waiting.

    The process is live but not ready, and has bound both ports."""
    write_usual(tmp_path)
    uds_path, grpc_port, http_port = str(tmp_path / "shard"), free_port(), free_port()
    ports = ["--bind", "127.0.0.1", "--port", str(http_port), "--grpc-port", str(grpc_port)]
    where = ["--tokenizer-path", str(tmp_path), "--shard-uds-path", uds_path]
    command = ["router", *where, *ports, "--max-sequence-length", str(MAX_SEQUENCE_LENGTH)]
    service = Service(command)
    deadline = time.monotonic() + 60
    while not connects(http_port):
        assert time.monotonic() < deadline, service.output
        time.sleep(0.05)
    assert not connects(grpc_port)
    assert get(f"http://127.0.0.1:{http_port}/live")[0] == 200
    assert get(f"http://127.0.0.1:{http_port}/health")[0] == 503
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            GenerationServiceStub(channel).Generate(batch("a"), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "Connection refused" in refused.value.details()
        server = ShardServer(FakeShard(), uds_path)
        service.wait_until_serving(60)
        answer = GenerationServiceStub(channel).Generate(batch("a"), timeout=10, wait_for_ready=True)
        assert answer.responses
    assert service.grpc_port == grpc_port
    assert service.end() == 0
    server.stop()


def test_the_ready_text_follows_the_line_about_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READY_TEXT", "Call it:\n\n  like this")
    setup = start_router(tmp_path, 1)
    setup.service.wait_for_line("  like this", 20)
    assert stop_router(setup) == 0
    lines = [line.removeprefix("Router 0: ") for line in setup.service.lines]  # of several workers
    first = lines.index("Call it:")
    assert lines[first - 1 : first + 4] == ["", "Call it:", "", "  like this", ""]
    assert any("serving gRPC" in line for line in lines[:first])
    assert lines.count("Call it:") == 1, "each router worker prints it"


def test_a_second_signal_cuts_the_drain_short(router: Setup) -> None:
    streams = Streams(router, count=2, step_s=0.2)
    router.service.process.send_signal(signal.SIGTERM)
    router.service.wait_for_line("draining requests: ", 30)
    router.service.process.send_signal(signal.SIGTERM)
    assert set(streams.errors()) == {grpc.StatusCode.UNAVAILABLE}
    assert router.service.process.wait(20) == 0
    assert "Traceback" not in router.service.output
    ends = [line for line in router.service.lines if "Streaming response" in line]
    assert len(ends) == 2
    assert all(f"failed with UNAVAILABLE: {STOPPED}" in line for line in ends), ends


def watch(setup: Setup, name: str) -> tuple[threading.Thread, "queue.SimpleQueue[int]"]:
    states: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        with contextlib.suppress(grpc.RpcError):
            for answer in health_pb2_grpc.HealthStub(setup.channel).Watch(request):
                states.put(answer.status)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, states


def test_watchers_get_each_change(router: Setup) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    statuses = health.List(health_pb2.HealthListRequest()).statuses
    assert {name: each.status for name, each in statuses.items()} == {"": SERVING, NAME: SERVING}
    watches = {name: watch(router, name) for name in ("", NAME, "nobody")}
    assert watches["nobody"][1].get(timeout=30) == SERVICE_UNKNOWN
    named = [states for name, (_, states) in watches.items() if name != "nobody"]
    assert [states.get(timeout=30) for states in named] == [SERVING] * 2
    router.servers[0].stop()
    assert [states.get(timeout=30) for states in named] == [NOT_SERVING] * 2
    assert get(router.http + "/health")[0] == 503
    assert get(router.http + "/live")[0] == 200
    restart_shards(router, epoch=2)
    assert [states.get(timeout=30) for states in named] == [SERVING] * 2
    router.service.wait_for_line("ready again after ", 5)
    assert router.service.end() == 0
    assert [states.get(timeout=30) for states in named] == [NOT_SERVING] * 2
    for thread, _ in watches.values():
        thread.join(30)


@pytest.mark.slow
def test_health_checks_are_answered_under_overload(router: Setup) -> None:
    """Check the health over gRPC and HTTP while calls are refused. Afterwards, full concurrency is free."""
    streams = Streams(router, count=4, step_s=0.05)
    health = health_pb2_grpc.HealthStub(router.channel)
    slowest, refused = 0.0, 0
    while not all(result.done() for result in streams._results):
        started = time.monotonic()
        assert health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=30).status == SERVING
        assert (get(router.http + "/health")[0], get(router.http + "/live")[0]) == (200, 200)
        slowest = max(slowest, time.monotonic() - started)
        refused += overloaded(router)
    assert slowest < 2
    assert refused > 5
    assert streams.results() == streams.expected()
    router.shards[0].step_s = 0.001
    assert len(router.stub.Generate(batch(*"abcd", stopping=stopping(1))).responses) == 4


def overloaded(setup: Setup) -> bool:
    call = setup.stub.GenerateStream(single("b", stopping=stopping(1)))
    with contextlib.suppress(grpc.RpcError):
        list(call)
    if call.code() is grpc.StatusCode.OK:
        return False
    assert (call.code(), call.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded")
    return True


def wait_for_calls(setup: Setup) -> None:
    """Wait until the clients use this replica. Otherwise, a restart of the other would leave them without
    any."""
    deadline = time.monotonic() + 20
    while metric(setup, 'tgi_request_count{kind="single"}') < 20:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_rolling_restart_of_two_replicas_loses_nothing(tmp_path: Path) -> None:
    """Check the documented client configuration with uninterrupted calls."""
    homes = [tmp_path / str(i) for i in range(2)]
    for home in homes:
        home.mkdir()
    replicas = [start_router(home, 1) for home in homes]
    addresses = ",".join(f"127.0.0.1:{setup.service.grpc_port}" for setup in replicas)
    options = [("grpc.service_config", SERVICE_CONFIG.read_text())]
    channel, ending = grpc.insecure_channel(f"ipv4:{addresses}", options), threading.Event()
    stub = GenerationServiceStub(channel)

    def call_until_the_end() -> int:
        count = 0
        while not ending.is_set():
            answer = stub.Generate(batch("a", stopping=stopping(20)), timeout=20)
            count += len(answer.responses)
        return count

    with ThreadPoolExecutor(16) as threads:
        counts = [threads.submit(call_until_the_end) for _ in range(16)]
        try:
            for i, setup in enumerate(replicas):
                for each in replicas:
                    wait_for_calls(each)
                ports = ["--port", str(setup.service.http_port), "--grpc-port", str(setup.service.grpc_port)]
                assert stop_router(setup) == 0, setup.service.output
                replicas[i] = start_router(homes[i], 1, *ports)
            wait_for_calls(replicas[-1])
        finally:
            ending.set()
        assert min(count.result(30) for count in counts) > 0
    channel.close()
    for setup in replicas:
        assert "draining" not in setup.service.output
        assert stop_router(setup) == 0


async def test_a_watcher_gets_an_end_that_comes_while_a_status_is_sent() -> None:
    state = Health(NAME)
    state.set(True)
    watching = state.Watch(health_pb2.HealthCheckRequest(service=NAME), None)  # type: ignore[arg-type]
    assert (await anext(watching)).status == SERVING
    state.drain()
    assert [answer.status async for answer in watching] == [NOT_SERVING]


def test_a_recovery_that_a_probe_does_not_wait_for_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "LIVENESS_PROBE_S", 0.1)
    state = Health("a")
    with caplog.at_level(logging.INFO):
        for pause_s, level in ((0.0, logging.INFO), (0.2, logging.WARNING)):
            state.set(True)
            state.set(False)
            time.sleep(pause_s)
            state.set(True)
            assert state.is_ready
            assert caplog.records[-1].levelno == level
            assert caplog.records[-1].message.startswith("ready again after 0.")
    state.drain()
    state.set(True)
    assert not state.is_ready
