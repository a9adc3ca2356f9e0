"""A launcher that is started again at once on the same ports and sockets, as caikit does."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.live_streams import long_request
from integration_tests.support.service import Client
from tests.support.processes import Service, children_of
from tgis.net.ports import IN_USE
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow


@pytest.fixture
def start(model: Model, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Launch with the same command every time; flags are given."""
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [str(one.getsockname()[1]) for one in free]
    for one in free:
        one.close()
    command = ["launcher", "--model-name", str(model.directory), "--bind", "127.0.0.1", "--num-shard", "2"]
    command += ["--port", ports[0], "--grpc-port", ports[1], "--shard-uds-path", str(tmp_path / "shard")]
    command += ["--termination-log", str(tmp_path / "log")]
    started: list[Service] = []

    def run(*flags: str) -> Service:
        started.append(Service([*command, *flags]))
        return started[-1]

    yield run
    for service in started:
        service.end()
    assert not list(tmp_path.glob("shard*"))


def ask(service: Service) -> str:
    client = Client(service)
    with client.channel:
        message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="girl")])
        return client.stub.Generate(message, timeout=60).responses[0].text


def test_after_a_kill(start: Callable[..., Service]) -> None:
    """Its sockets and copies still exist; its shards die with it, before the next ones start."""
    first = start().wait_until_serving()
    expected, children = ask(first), chain(*children_of(first.process.pid).values())
    os.kill(first.process.pid, signal.SIGKILL)
    killed_at, second = time.monotonic(), start()
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < killed_at + 30
    assert ask(second.wait_until_serving()) == expected
    assert second.grpc_port == first.grpc_port


def test_after_a_signal(start: Callable[..., Service]) -> None:
    """The restart does not wait for that."""
    first = start().wait_until_serving()
    expected = ask(first)
    first.process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    first.process.send_signal(signal.SIGTERM)  # the same one: `timeout` signals a process, and then its group
    second = start()
    assert first.process.wait(30) == 0
    first.end()
    assert ask(second.wait_until_serving()) == expected


def test_while_the_first_one_drains(start: Callable[..., Service]) -> None:
    """The second launcher ends with one line that names the port; the first one's streams are unaffected."""
    first = start("--failpoints", "router.before_step=sleep:0.03").wait_until_serving()
    client = Client(first)
    with ThreadPoolExecutor(1) as threads, client.channel:
        stream = client.stub.GenerateStream(long_request("girl"), timeout=60)
        next(stream)
        next(stream)
        first.process.send_signal(signal.SIGTERM)
        reading = threads.submit(list, stream)
        second = start()
        second.process.wait(20)
        assert first.process.poll() is None or reading.done()
        assert reading.result(60)[-1].stop_reason == pb.MAX_TOKENS
    assert second.end() == 1
    text = f"error: port {first.http_port} on 127.0.0.1 cannot be opened: Address already in use{IN_USE}"
    assert second.lines[-1] == text
    assert first.process.wait(30) == 0
    first.end()
