"""Runs a service that Prometheus scrapes, with traffic and a fault."""

import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest

from scripts.prometheus import Prometheus
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MAX_CONCURRENT = 8


@dataclass(frozen=True)
class Watched:
    """Prometheus and the service under load."""

    service: Service
    prometheus: Prometheus

    def scrape(self) -> str:
        with urllib.request.urlopen(self.service.http + "/metrics", timeout=10) as response:
            return str(response.read().decode())


def ask(service: Service, prompts: list[str], adapters: list[str]) -> None:
    """Send traffic for every series that traffic alone produces."""
    with service.channel() as channel, ThreadPoolExecutor(8) as clients:
        stub = GenerationServiceStub(channel)
        texts = [f"once upon a time a time a time {i % 3}" for i in range(8)]
        list(clients.map(lambda text: list(stub.GenerateStream(_single(text))), texts))
        for ids in ({"prefix_id": prompts[0]}, {"adapter_id": adapters[0]}):
            request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")], **ids)
            stub.Generate(request, metadata=[("tgis-presence-penalty", "0.5")])
        stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a b")]))
        for refused in (_batch(0, min_new_tokens=500), _batch(MAX_CONCURRENT + 1)):
            with pytest.raises(grpc.RpcError):
                stub.Generate(refused)


def lose_a_shard(service: Service) -> None:
    """Kill a shard during a stream, which completes nevertheless."""
    with service.channel() as channel:
        stub = GenerationServiceStub(channel)
        [shard] = children_of(service.process.pid)["serve"]  # which takes as long as many tokens
        stream = stub.GenerateStream(_single("once upon a time", 150))
        next(stream), next(stream)
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
