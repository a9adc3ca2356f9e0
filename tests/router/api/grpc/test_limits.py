"""Tests the limits of the gRPC port: sizes, streams, connections, and how it reports an overload."""

import contextlib
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.support.router import attacks
from tests.support.router.attacks import Bystander
from tests.support.router.expected_answers import expected_text, expected_tokens
from tests.support.router.http2 import Connection, Kind
from tests.support.router.http_port import get, metric
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb

HOST = "127.0.0.1"
MAX_MESSAGE, MAX_METADATA, MAX_REQUESTS = 100_000, 12_000, 120
NUM_FILES = 600
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """Limit the open files of processes started within the context."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    flags = ["--max-message-bytes", str(MAX_MESSAGE), "--max-metadata-bytes", str(MAX_METADATA)]
    flags += ["--max-concurrent-requests", str(MAX_REQUESTS)]
    with few_files():
        setup = start_router(tmp_path_factory.mktemp("limits"), 1, *flags)
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def test_the_largest_message(router: Setup) -> None:
    request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="")])
    request.model_id = "x" * (MAX_MESSAGE - request.ByteSize() - 4)
    assert request.ByteSize() == MAX_MESSAGE
    assert len(router.stub.Tokenize(request).responses) == 1
    request.model_id += "x"
    with pytest.raises(grpc.RpcError) as caught:
        router.stub.Tokenize(request)
    assert caught.value.code() is EXHAUSTED


def test_the_maximum_size_of_metadata(router: Setup) -> None:
    """The limit holds each time, unlike between gRPC's own two limits."""
    for _ in range(4):
        router.stub.ModelInfo(pb.ModelInfoRequest(), metadata=[("x", "y" * (MAX_METADATA - 1000))])
        with pytest.raises(grpc.RpcError) as caught:
            router.stub.ModelInfo(pb.ModelInfoRequest(), metadata=[("x", "y" * MAX_METADATA)])
        assert caught.value.code() is EXHAUSTED


def test_a_client_with_many_calls_on_one_connection_loses_none(router: Setup) -> None:
    """gRPC refuses streams of a connection above a number that it counts late."""
    with ThreadPoolExecutor(115) as threads:
        for _ in range(3):
            answers = threads.map(lambda _: router.stub.Generate(batch("a")), range(115))
            assert sum(len(answer.responses) for answer in answers) == 115


def test_a_batch_takes_all_its_permits_or_none(router: Setup) -> None:
    router.shards[0].step_s = 0.02
    try:
        held = router.stub.Generate.future(batch(*["a"] * 70, stopping=stopping(60, min_new_tokens=60)))
        deadline = time.monotonic() + 30
        while metric(router, "tgi_permits_used") != 70:
            assert time.monotonic() < deadline
        with pytest.raises(grpc.RpcError) as caught:
            router.stub.Generate(batch(*["b"] * 51, stopping=stopping(1)))
        assert (caught.value.code(), caught.value.details()) == (EXHAUSTED, "Model is overloaded")
        assert metric(router, "tgi_permits_used") == 70
        router.shards[0].step_s = 0.001
        assert len(router.stub.Generate(batch(*["b"] * 50, stopping=stopping(1))).responses) == 50
        assert len(held.result(30).responses) == 70
    finally:
        router.shards[0].step_s = 0.001
    assert metric(router, "tgi_permits_used") == 0


def test_an_overload_says_when_to_come_again(router: Setup) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        router.stub.Generate(batch(*["a"] * (MAX_REQUESTS + 1)))
    trailing = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    assert (status.code, status.message) == (EXHAUSTED.value[0], "Model is overloaded")
    retry = error_details_pb2.RetryInfo()
    [detail] = status.details
    assert detail.Unpack(retry)
    assert retry.retry_delay.seconds == 1
    assert trailing["grpc-retry-pushback-ms"] == "1000"
    with pytest.raises(grpc.RpcError) as caught:
        router.stub.Generate(batch("a", stopping=stopping(2**31)))
    assert dict(caught.value.trailing_metadata()) == {}


@pytest.mark.one_worker("each worker has a limit of its own for its files")
def test_half_open_connections_leave_files_for_the_rest(router: Setup) -> None:
    """They outnumber the files that the process may open."""
    process, port = psutil.Process(router.service.process.pid), router.service.grpc_port
    before = process.num_fds()
    with Bystander(HOST, port) as bystander:
        with attacks.half_open(HOST, port, NUM_FILES + 100, 0):
            time.sleep(0.5)
            assert 250 < process.num_fds() < NUM_FILES - 200
            assert get(router.http + "/health") == (200, "")
    assert bystander.lost == []
    with Bystander(HOST, port) as newcomer:
        pass
    assert newcomer.lost == []
    deadline = time.monotonic() + 20
    while process.num_fds() > before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_connections_that_say_nothing_make_way(router: Setup) -> None:
    port, begun = router.service.grpc_port, time.monotonic()
    with attacks.half_open(HOST, port, NUM_FILES, 0) as ends:
        for end in ends:
            end.settimeout(30)
            with contextlib.suppress(ConnectionError):
                while end.recv(1000):
                    pass
        assert time.monotonic() - begun < 25


@pytest.mark.slow
def test_old_connections_are_asked_to_go_and_their_streams_finish(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1, "--max-connection-age", "0.5")
    try:
        setup.shards[0].step_s = 0.02
        with Connection(HOST, setup.service.grpc_port) as connection:
            begun = time.monotonic()
            request = single("fox", stopping=stopping(60, min_new_tokens=60))
            text = "".join(part.text for part in setup.stub.GenerateStream(request))
            assert time.monotonic() - begun > 1.0
            frames = list(connection.frames(0.1))
        assert text == expected_text(setup, expected_tokens(setup, "fox", 60))
        assert any(each.kind == Kind.GOAWAY for each in frames)
        setup.stub.ModelInfo(pb.ModelInfoRequest())
    finally:
        assert stop_router(setup) == 0
