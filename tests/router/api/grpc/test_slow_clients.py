"""Tests clients that do not read their answers, as raw HTTP/2: their resources are freed, and other clients
notice nothing."""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.router.expected_answers import expected_text, expected_tokens
from tests.support.router.fake_shard import ShardServer
from tests.support.router.http2 import (
    ACK,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    Connection,
    Frame,
    Kind,
    frame,
)
from tests.support.router.http_port import metric
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.router.router_usage import RouterProcesses
from tgis.pb import generation_pb2 as pb
from tgis.router.api.grpc.unsent_answers import TEXT as UNSENT

TIMEOUT_S = 0.7
LENGTH = 150
STREAM = "/fmaas.GenerationService/GenerateStream"
WATCH = "/grpc.health.v1.Health/Watch"
MODEL_INFO = "/fmaas.GenerationService/ModelInfo"
TOKENIZE = "/fmaas.GenerationService/Tokenize"
IDLE = ("tgi_requests_live", "tgi_permits_used", "tgi_kv_cache_usage_ratio")
SLOW = 'tgi_request_failure{err="slow_reader"}'
CANCELLED = 'tgi_request_failure{err="cancelled"}'
LOG_LINE = "failed with RESOURCE_EXHAUSTED: the client does not read its answer"
REQUEST = single("girl", stopping=stopping(LENGTH, min_new_tokens=LENGTH)).SerializeToString()
A_TOKEN = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")])
MANY_TOKENS = pb.BatchedTokenizeRequest(
    requests=[pb.TokenizeRequest(text="a b " * 20_000)], return_tokens=True, return_offsets=True
)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("slow"), 1, "--slow-reader-timeout", str(TIMEOUT_S))
    setup.stub.Generate(batch("a"))
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output


@pytest.fixture(scope="module")
def num_tasks(router: Setup) -> float:
    """Return the number of tasks without calls."""
    return metric(router, "tgi_tasks")


def wait(condition: Callable[[], bool], timeout_s: float = 60) -> float:
    """Wait for the condition and return the seconds it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s
        time.sleep(0.02)
    return time.monotonic() - begun


def is_idle(setup: Setup, num_tasks: float) -> bool:
    return metric(setup, "tgi_tasks") <= num_tasks and not any(metric(setup, name) for name in IDLE)


def no_reader(setup: Setup, window: int = 0) -> Connection:
    connection = Connection("127.0.0.1", setup.service.grpc_port, [(INITIAL_WINDOW_SIZE, window)])
    connection.send(frame(Kind.SETTINGS, flags=ACK))
    return connection


def make_next_call(connection: Connection, stream: int) -> None:
    """Let grpc.aio reset ended calls. Each worker does so when it accepts its next call."""
    connection.call(stream, MODEL_INFO, b"")
    connection.send(frame(Kind.WINDOW_UPDATE, struct.pack("!I", 1 << 16), stream=stream))


def of_stream(frames: list[Frame], stream: int, kind: Kind) -> list[Frame]:
    return [each for each in frames if (each.stream, each.kind) == (stream, kind)]


def test_only_an_unread_stream_is_reset(router: Setup, num_tasks: float) -> None:
    slow, cancelled = metric(router, SLOW), metric(router, CANCELLED)
    router.shards[0].step_s = 0.01
    try:
        with no_reader(router) as connection:
            connection.call(1, STREAM, REQUEST)
            wait(lambda: metric(router, "tgi_permits_used") == 1)
            parts = router.stub.GenerateStream(single("fox", stopping=stopping(40, min_new_tokens=40)))
            text = "".join(part.text for part in parts)
            assert text == expected_text(router, expected_tokens(router, "fox", 40))
            wait(lambda: is_idle(router, num_tasks + 2))  # except gRPC's own wait for the stream's end
            wait(lambda: is_idle(router, num_tasks))
            make_next_call(connection, 3)
            frames = list(connection.frames(0.5))
    finally:
        router.shards[0].step_s = 0.001
    assert of_stream(frames, 1, Kind.RST_STREAM)
    assert (metric(router, SLOW) - slow, metric(router, CANCELLED) - cancelled) == (1, 0)
    assert sum(LOG_LINE in line for line in router.service.lines) == 1


def test_a_slow_reader_that_resumes_gets_its_error(router: Setup) -> None:
    slow = metric(router, SLOW)
    with no_reader(router) as connection:
        connection.call(1, STREAM, REQUEST)
        wait(lambda: metric(router, SLOW) == slow + 1)
        connection.send(frame(Kind.WINDOW_UPDATE, struct.pack("!I", 1 << 20), stream=1))
        frames = list(connection.frames(0.5))
    *_, last = of_stream(frames, 1, Kind.HEADERS)
    assert last.flags & END_STREAM
    assert b"grpc-status\x018" in last.payload
    assert b"the client does not read its answer" in last.payload


def test_slow_readers_are_served(router: Setup) -> None:
    router.shards[0].step_s = 0.012  # almost two seconds, more than twice the timeout
    try:
        with no_reader(router) as connection:
            connection.call(1, STREAM, REQUEST)
            deadline = time.monotonic() + 30
            frames: list[Frame] = []
            while not any(each.flags & END_STREAM for each in of_stream(frames, 1, Kind.HEADERS)):
                assert time.monotonic() < deadline
                connection.send(frame(Kind.WINDOW_UPDATE, struct.pack("!I", 100), stream=1))
                frames += connection.frames(0.1)
    finally:
        router.shards[0].step_s = 0.001
    assert b"grpc-status\x010" in of_stream(frames, 1, Kind.HEADERS)[-1].payload


@pytest.mark.parametrize("num_rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_unread_answers_are_dropped(router: Setup, num_tasks: float, num_rounds: int) -> None:
    """Each round has ten megabytes of answers. Later rounds need only memory that the first round freed."""
    wait(lambda: is_idle(router, num_tasks))
    processes = RouterProcesses(router)
    sizes = []
    with no_reader(router) as connection:
        for first in range(1, 100 * num_rounds, 100):
            for stream in range(first, first + 20, 2):
                connection.call(stream, TOKENIZE, MANY_TOKENS.SerializeToString())
            wait(lambda: metric(router, "tgi_tasks") >= num_tasks + 10)
            wait(lambda: is_idle(router, num_tasks))
            sizes.append(processes.rss >> 20)
        make_next_call(connection, 100 * num_rounds + 1)
        frames = list(connection.frames(0.5))
    assert len([each for each in frames if each.kind == Kind.RST_STREAM]) == 10 * num_rounds
    assert sizes[-1] - sizes[0] < 40, sizes


@pytest.mark.slow
def test_an_unread_socket(router: Setup, num_tasks: float) -> None:
    """Its streams cannot even begin. The sockets of both ends have room for megabytes."""
    wait(lambda: is_idle(router, num_tasks))
    slow = metric(router, SLOW)
    with no_reader(router, 0x7FFFFFFF) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.send(frame(Kind.WINDOW_UPDATE, struct.pack("!I", 0x7FFF0000)))
        for stream in range(1, 51, 2):
            connection.call(stream, TOKENIZE, MANY_TOKENS.SerializeToString())
        wait(lambda: metric(router, "tgi_tasks") >= num_tasks + 2)
        wait(lambda: is_idle(router, num_tasks))  # these answers have filled the sockets
        connection.call(101, STREAM, REQUEST)
        wait(lambda: metric(router, SLOW) == slow + 1)
        wait(lambda: is_idle(router, num_tasks))


def test_an_unread_health_watch_blocks_no_other(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1, "--shutdown-timeout", "1")
    status = health_pb2.HealthCheckResponse
    try:
        with no_reader(setup) as connection:
            connection.call(1, WATCH, b"")
            list(connection.frames(0.2))
            watch = health_pb2_grpc.HealthStub(setup.channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=20
            )
            assert next(watch).status == status.SERVING
            setup.servers.pop().stop()
            assert next(watch).status == status.NOT_SERVING
            setup.servers.append(ShardServer(setup.shards[0], setup.uds_path))
            assert next(watch).status == status.SERVING
            assert setup.service.end(timeout_s=10) == 0
    finally:
        stop_router(setup)


def test_calls_that_are_reset_while_their_answers_are_sent_are_one_line(router: Setup) -> None:
    """gRPC's clients reset the call when an answer exceeds their limit."""
    num_lines = len(router.service.lines)
    with no_reader(router) as connection:
        streams = list(range(1, 10, 2))
        for stream in streams:
            connection.call(stream, TOKENIZE, A_TOKEN.SerializeToString())
        waiting = {*streams}
        for received in connection.frames():
            waiting -= {received.stream} if received.kind == Kind.HEADERS else set()
            if not waiting:
                break
        assert not waiting
        for stream in streams:
            connection.send(frame(Kind.RST_STREAM, struct.pack("!I", 8), stream=stream))
        wait(lambda: len(router.service.lines) > num_lines)
    router.stub.ModelInfo(pb.ModelInfoRequest())
    logged = router.service.lines[num_lines:]
    assert [UNSENT in line for line in logged] == [True], logged
