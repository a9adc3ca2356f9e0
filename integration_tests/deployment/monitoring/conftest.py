"""A launched service on a tiny checkpoint that has answered requests of every kind and has lost a shard, and
a Prometheus that scrapes it."""

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from integration_tests.conftest import launch
from integration_tests.served_models import FLAGS, write_fallback
from scripts.prometheus import PROMTOOL, Prometheus
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

RULES = Path(__file__).parents[3] / "deployment" / "monitoring" / "rules.yaml"

MAX_CONCURRENT = 8


@pytest.fixture(scope="session")
def promtool() -> Path:
    if not PROMTOOL.is_file():
        pytest.skip("NOTICE: promtool is missing (scripts/fetch_prometheus.sh): rules are not checked")
    return PROMTOOL


@dataclass(frozen=True)
class Watched:
    """What Prometheus knows of a service under load."""

    service: Service
    prometheus: Prometheus

    def scrape(self) -> str:
        with urllib.request.urlopen(self.service.http + "/metrics", timeout=10) as response:
            return str(response.read().decode())


@pytest.fixture(scope="session")
def watched(promtool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    served = write_fallback(tmp_path_factory.mktemp("models") / "served")
    limits = ["--max-concurrent-requests", str(MAX_CONCURRENT), "--max-batch-size", "4", "--speculate", "3"]
    service = launch(served.directory, *FLAGS, *served.flags, *limits).wait_until_serving()
    prompts, adapters = list(served.store.prompts), list(served.store.adapters)
    target = f"127.0.0.1:{service.http_port}"
    try:
        with Prometheus(tmp_path_factory.mktemp("prometheus"), target, RULES) as prometheus:
            for _ in range(4):
                ask(service, prompts, adapters)
                time.sleep(1)
            lose_a_shard(service)
            time.sleep(3)
            yield Watched(service, prometheus)
    finally:
        assert service.end() == 0, service.output


def ask(service: Service, prompts: list[str], adapters: list[str]) -> None:
    """Something for every series that traffic alone brings about."""
    with service.channel() as channel, ThreadPoolExecutor(8) as clients:
        stub = GenerationServiceStub(channel)
        texts = [f"once upon a time a time a time {i % 3}" for i in range(8)]
        list(clients.map(lambda text: list(stub.GenerateStream(_single(text))), texts))
        for ids in ({"prefix_id": prompts[0]}, {"adapter_id": adapters[0]}):
            stub.Generate(pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")], **ids))
        stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a b")]))
        for refused in (_batch(0, min_new_tokens=500), _batch(MAX_CONCURRENT + 1)):
            with pytest.raises(grpc.RpcError):
                stub.Generate(refused)


def lose_a_shard(service: Service) -> None:
    """In the middle of a stream, which ends well all the same."""
    with service.channel() as channel:
        stub = GenerationServiceStub(channel)
        stream = stub.GenerateStream(_single("once upon a time", 150))
        next(stream), next(stream)
        [shard] = children_of(service.process.pid)["serve"]
        os.kill(shard, signal.SIGKILL)
        assert list(stream)[-1].stop_reason


def _batch(more: int, **stopping: int) -> pb.BatchedGenerationRequest:
    params = pb.Parameters(stopping=pb.StoppingCriteria(**stopping))
    requests = [pb.GenerationRequest(text="a") for _ in range(more + 1)]
    return pb.BatchedGenerationRequest(requests=requests, params=params)


def _single(text: str, num_tokens: int = 40) -> pb.SingleGenerationRequest:
    stopping = pb.StoppingCriteria(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    params = pb.Parameters(stopping=stopping)
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)
