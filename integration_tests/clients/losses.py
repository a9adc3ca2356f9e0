"""Drains a service behind the Shepherd Model Gateway, kills another one, and counts the lost streams."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from integration_tests.clients.gateway import Gateway, ask, engine_of
from integration_tests.clients.served import WORDS
from integration_tests.support.service import Client
from tests.support.processes import children_of

NUM_STREAMS, STREAM_TOKENS = 32, 400
TIMEOUT_S = 60.0


def check_losses(gateway: Gateway) -> None:
    """Check that a drain loses nothing and a kill only its own streams. Two of the services end."""
    with gateway.run_another("losses") as url:
        texts = _expected_texts(url)
        _drain_one(gateway, url, texts)
        _kill_one(gateway, url, texts)


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
    with ask(url, messages, STREAM_TOKENS, stream=True, ignore_eos=True) as answer:
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
    stub, health, deadline = engine_of(client), HealthStub(client.channel), time.monotonic() + TIMEOUT_S
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
    load = engine_of(client).GetServerInfo(pb.GetServerInfoRequest())
    return int(load.active_requests)
