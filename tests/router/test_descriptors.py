"""Checks a router without free file descriptors.

It serves connected clients, makes others wait or refuses them, and recovers when descriptors are free."""

import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.router.http_port import get
from tests.support.router.messages import single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.one_worker("limits the files of a single process")

NUM_SPARE, NUM_CONNECTIONS = 10, 100
LENGTH = 190


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[tuple[Setup, dict[str, float]]]:
    """Start a router that may open only a few more descriptors."""
    setup = start_router(tmp_path, 1)
    setup.stub.ModelInfo(pb.ModelInfoRequest())
    baseline = take_baseline(setup.http)
    limit = int(baseline["tgi_open_descriptors"]) + NUM_SPARE
    resource.prlimit(setup.service.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    yield setup, baseline
    assert stop_router(setup) == 0


def ask_anew(setup: Setup, timeout_s: float) -> None:
    """Send a call on a new connection."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{setup.service.grpc_port}", own) as channel:
        stub = GenerationServiceStub(channel)
        stub.ModelInfo(pb.ModelInfoRequest(), timeout=timeout_s, wait_for_ready=True)


def cpu_s(setup: Setup, during_s: float) -> float:
    """Return the router's CPU time during the next `during_s` seconds."""
    process = psutil.Process(setup.service.process.pid)
    before = process.cpu_times()
    time.sleep(during_s)
    after = process.cpu_times()
    return after.user - before.user + after.system - before.system


def wait_for(works: Callable[[], object]) -> float:
    """Repeat the call until it succeeds, and return the seconds that it took."""
    began = time.monotonic()
    while True:
        try:
            works()
            return time.monotonic() - began
        except OSError:
            assert time.monotonic() - began < 30
            time.sleep(0.1)


@pytest.mark.slow
def test_a_router_without_descriptors(narrow: tuple[Setup, dict[str, float]]) -> None:
    setup, baseline = narrow
    setup.shards[0].step_s = 0.03
    stream = setup.stub.GenerateStream(single("a", stopping=stopping(LENGTH, min_new_tokens=LENGTH)))
    next(stream), next(stream)
    address = ("127.0.0.1", setup.service.grpc_port)
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list, stream)
        connections = [socket.create_connection(address, timeout=5) for _ in range(NUM_CONNECTIONS)]
        try:
            busy = cpu_s(setup, during_s=2)
            print(f"{busy:.2f} s computed in 2 s")
            assert busy < 1
            with pytest.raises(grpc.RpcError) as refused:
                ask_anew(setup, timeout_s=1)
            assert refused.value.code() in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            )
            with pytest.raises((OSError, urllib.error.URLError)):
                urllib.request.urlopen(f"{setup.http}/health", timeout=1)
            assert rest.result(30)[-1].generated_token_count == LENGTH
            assert not setup.service.process.poll()
        finally:
            for connection in connections:
                connection.close()
    print(f"HTTP after {wait_for(lambda: get(f'{setup.http}/health')):.1f} s")
    began = time.monotonic()
    ask_anew(setup, timeout_s=30)
    print(f"gRPC after {time.monotonic() - began:.1f} s more")
    assert get(f"{setup.http}/health")[0] == get(f"{setup.http}/metrics")[0] == 200
    assert_nothing_left(setup.http, baseline, timeout_s=30)
