"""Checks of several services behind the Shepherd Model Gateway: which share of the prompts is cached, and
what is lost when one service drains and another one is killed."""

import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from integration_tests.clients.gateway import Gateway, run_gateway
from integration_tests.clients.served import MODEL, WORDS
from integration_tests.support.service import Client
from tests.support.accounts import scrape
from tests.support.processes import children_of

NUM_STREAMS = 32
STREAM_TOKENS = 400
NUM_CONVERSATIONS, NUM_TURNS, TURN_WORDS, TURN_TOKENS = 12, 4, 60, 16
EVENTS_S = 0.5
"""Time for cache events to reach the gateway. Users need longer to read an answer."""
TIMEOUT_S = 60.0


def check_fleet(gateway: Gateway) -> None:
    """Check at least three services. One of them is drained and another one is killed."""
    _compare_policies(gateway)
    with _gateway(gateway, "losses") as url:
        texts = _expected_texts(url)
        _drain_one(gateway, url, texts)
        _kill_one(gateway, url, texts)


@contextmanager
def _gateway(gateway: Gateway, name: str, *flags: str, num_services: int | None = None) -> Iterator[str]:
    log = Path(gateway.served.directory).parent / f"smg-{name}.log"
    with run_gateway(gateway.smg, gateway.worker_urls[:num_services], log, *flags) as url:
        yield url


# Shares of cached prompt tokens


def _compare_policies(gateway: Gateway) -> None:
    single = _measure_hits(gateway, "single", "cache_aware", 1)
    aware = _measure_hits(gateway, "aware", "cache_aware", 3)
    by_chance = _measure_hits(gateway, "random", "random", 3)
    print(
        f"  cached prompt tokens of {NUM_CONVERSATIONS} conversations: one service {single:.1%}, "
        f"three {aware:.1%}, three by chance {by_chance:.1%}",
        flush=True,
    )
    assert aware >= 0.9 * single
    assert by_chance < aware


def _measure_hits(gateway: Gateway, name: str, policy: str, num_services: int) -> float:
    """Return the share of prompt tokens that were cached in the conversations."""
    services = gateway.services[:num_services]
    for client in services:
        _engine(client).FlushCache(common_pb2.FlushCacheRequest())
    before = [_count_cached(client) for client in services]
    with _gateway(gateway, name, "--policy", policy, num_services=num_services) as url:
        _converse(url)
    after = [_count_cached(client) for client in services]
    changes = [
        (late.hits - early.hits, late.queries - early.queries)
        for early, late in zip(before, after, strict=True)
    ]
    print(f"  {policy} with {num_services}: cached and prompt tokens by service {changes}", flush=True)
    return sum(hits for hits, _ in changes) / sum(queries for _, queries in changes)


class _Counts(NamedTuple):
    hits: float
    queries: float


def _count_cached(client: Client) -> _Counts:
    values = scrape(client.service.http)
    return _Counts(values["tgi_prefix_cache_hits_total"], values["tgi_prefix_cache_queries_total"])


def _converse(url: str) -> None:
    """Hold all conversations at the same time. Each has a beginning of its own."""
    r = random.Random(5)
    chats: list[list[dict[str, str]]] = [[] for _ in range(NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(NUM_CONVERSATIONS) as threads:
        for _ in range(NUM_TURNS):
            for chat in chats:
                chat.append({"role": "user", "content": " ".join(r.choices(WORDS, k=TURN_WORDS))})
            for chat, text in zip(chats, threads.map(lambda chat: _answer(url, chat), chats), strict=True):
                chat.append({"role": "assistant", "content": text})
            time.sleep(EVENTS_S)


def _answer(url: str, messages: list[dict[str, str]]) -> str:
    with _ask(url, messages, TURN_TOKENS) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def _ask(url: str, messages: list[dict[str, str]], max_tokens: int, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


# Losses


class _Streams:
    """Streams through the gateway, each in a thread."""

    def __init__(self, url: str, texts: list[str]) -> None:
        self._url, self._texts = url, texts
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._begun = threading.Barrier(NUM_STREAMS + 1)
        self._results = [self._pool.submit(self._read, number) for number in range(NUM_STREAMS)]

    def wait_until_begun(self) -> None:
        self._begun.wait(TIMEOUT_S)

    def finish(self) -> list[str]:
        """Return the errors of all streams; empty texts for whole answers."""
        self._pool.shutdown()
        return [result.result() for result in self._results]

    def _read(self, number: int) -> str:
        text = ""
        try:
            for part in _stream(self._url, number):
                if not text:
                    self._begun.wait(TIMEOUT_S)
                text += part
        except (OSError, _StreamError) as error:
            assert self._texts[number].startswith(text)
            return str(error)
        assert text == self._texts[number]
        return ""


class _StreamError(Exception):
    """Error that the gateway sent in a stream, or a stream without an end."""


def _stream(url: str, number: int) -> Iterator[str]:
    messages = [{"role": "user", "content": f"{WORDS[number % len(WORDS)]} {number}"}]
    with _ask(url, messages, STREAM_TOKENS, stream=True, ignore_eos=True) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data.startswith("{"):
                message = json.loads(data)
                if "error" in message:
                    raise _StreamError(message["error"]["message"])
                if message["choices"] and (text := message["choices"][0]["delta"].get("content")):
                    yield text
    raise _StreamError("the stream has no end")


def _expected_texts(url: str) -> list[str]:
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        return list(threads.map(lambda number: "".join(_stream(url, number)), range(NUM_STREAMS)))


def _drain_one(gateway: Gateway, url: str, texts: list[str]) -> None:
    client = gateway.services.pop()
    streams = _Streams(url, texts)
    streams.wait_until_begun()
    num_running = _num_running(client)
    client.service.process.send_signal(signal.SIGTERM)
    seen = _watch_drain(client)
    late = [_stream_or_error(url, number) for number in range(8)]
    errors = [error for error in streams.finish() if error]
    print(f"  drained with {num_running} of {NUM_STREAMS}, lost {len(errors)}; {seen}", flush=True)
    assert num_running > 0
    assert errors == []
    assert seen == ["not ready", "refuses"], "clients see the drain before requests are refused"
    assert late == texts[: len(late)]
    assert client.service.process.wait(TIMEOUT_S) == 0


def _watch_drain(client: Client) -> list[str]:
    """Return what a client of a draining service sees: its health, until it refuses requests."""
    seen: list[str] = []
    stub, health, deadline = _engine(client), HealthStub(client.channel), time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            is_healthy = stub.HealthCheck(pb.HealthCheckRequest()).healthy
            status = health.Check(health_pb2.HealthCheckRequest()).status
            list(stub.Generate(pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=1))))
        except grpc.RpcError:
            return [*seen, "refuses"]
        is_serving = status == health_pb2.HealthCheckResponse.SERVING
        state = "serves" if is_healthy else "differs" if is_serving else "not ready"
        if seen[-1:] != [state] and (seen or state != "serves"):  # the signal may not have arrived yet
            seen.append(state)
    raise AssertionError("the draining service refuses nothing")


def _kill_one(gateway: Gateway, url: str, texts: list[str]) -> None:
    client = gateway.services.pop()
    streams = _Streams(url, texts)
    streams.wait_until_begun()
    num_running = _num_running(client)
    _kill(client)
    late = [_stream_or_error(url, number) for number in range(8)]
    errors = [error for error in streams.finish() if error]
    print(
        f"  killed with {num_running} of {NUM_STREAMS} streams, lost {len(errors)}; {set(errors)}", flush=True
    )
    assert len(errors) == num_running > 0
    assert late == texts[: len(late)]


def _kill(client: Client) -> None:
    """Kill all processes of a service at once, as a lost machine would."""
    process = client.service.process
    children = [pid for pids in children_of(process.pid).values() for pid in pids]
    for pid in (process.pid, *children):
        os.kill(pid, signal.SIGKILL)


def _stream_or_error(url: str, number: int) -> str:
    try:
        return "".join(_stream(url, number))
    except (OSError, _StreamError) as error:
        return f"failed: {error}"


def _num_running(client: Client) -> int:
    load = _engine(client).GetServerInfo(pb.GetServerInfoRequest())
    return int(load.active_requests)


def _engine(client: Client) -> Any:
    return VllmEngineStub(client.channel)  # type: ignore[no-untyped-call]
