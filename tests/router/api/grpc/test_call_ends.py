"""Tests how calls end. Reference counts alone free everything of a call. A refusal is a status without a
message before it, which clients may retry."""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.support.accounts import scrape
from tests.support.router.http2 import ACK, END_STREAM, Connection, Frame, Kind, frame
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

METADATA = (("authorization", "Bearer secret"),)
NUM_PERMITS = 20
LENGTH = 150
REFUSED = pb.StoppingCriteria(min_new_tokens=21)  # above the maximum number of new tokens
LONG = pb.StoppingCriteria(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
LONG_TEXT = "fox " * 10_000  # long enough for the tokenization process
LONGER_TEXT = "fox " * 200_000  # long enough to be cancelled in time
VALIDATION = 'tgi_request_failure_total{err="validation"}'
CALLS = 'tgi_request_count_total{kind="single"}'
SERVICE = "/fmaas.GenerationService"
WAIT_S = 20.0
NUM_CALLS = 3  # number of calls of each kind
RETRY_POLICY = {
    "maxAttempts": 3,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["INVALID_ARGUMENT"],
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    home: Path = tmp_path_factory.mktemp("router")
    (home / "tokens").write_text("secret\n")
    flags = ["--auth-tokens-path", str(home / "tokens"), "--max-concurrent-requests", str(NUM_PERMITS)]
    setup = start_router(home, 1, *flags, module="tests.support.router.uncollected_router")
    setup.stub.Generate(batch("a"), metadata=METADATA)
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output
    assert "swallowed" not in setup.service.output, "as grpc.aio says of an error that it misses"


def batch(*texts: str, **more: Any) -> pb.BatchedGenerationRequest:
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return pb.BatchedGenerationRequest(requests=requests, params=pb.Parameters(**more))


def single(text: str, **more: Any) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=pb.Parameters(**more))


def generate(*texts: str, **more: Any) -> Callable[[Setup], object]:
    return lambda setup: setup.stub.Generate(batch(*texts, **more), metadata=METADATA)


def stream(text: str, **more: Any) -> Callable[[Setup], object]:
    return lambda setup: list(setup.stub.GenerateStream(single(text, **more), metadata=METADATA))


def cancel_computing(*texts: str) -> Callable[[Setup], object]:
    def cancel(setup: Setup) -> None:
        call = setup.stub.Generate.future(batch(*texts, stopping=LONG), metadata=METADATA)
        wait_until(lambda: scrape(setup.http)["tgi_requests_running"] == len(texts))
        call.cancel()

    return slowly(cancel)


def cancel_streaming(setup: Setup) -> None:
    call = setup.stub.GenerateStream(single("a", stopping=LONG), metadata=METADATA)
    next(call), next(call)
    call.cancel()


def cancel_tokenizing(setup: Setup) -> None:
    calls = scrape(setup.http)[CALLS]
    call = setup.stub.Generate.future(batch(LONGER_TEXT), metadata=METADATA)
    wait_until(lambda: scrape(setup.http)[CALLS] > calls)
    call.cancel()


def be_late(setup: Setup) -> None:
    setup.stub.Generate(batch("a", stopping=LONG), metadata=METADATA, timeout=1.5)


def slowly(call: Callable[[Setup], object]) -> Callable[[Setup], object]:
    def run(setup: Setup) -> None:
        setup.shards[0].step_s = 0.02
        try:
            call(setup)
        finally:
            setup.shards[0].step_s = 0.001

    return run


def refuse_rows(call: Callable[[Setup], object]) -> Callable[[Setup], object]:
    def run(setup: Setup) -> None:
        setup.shards[0].model.refuses = lambda message: True
        try:
            call(setup)
        finally:
            setup.shards[0].model.refuses = lambda message: False

    return run


def ask_for_a_soft_prompt(setup: Setup) -> None:
    request = batch("a")
    request.prefix_id = "nowhere"
    setup.stub.Generate(request, metadata=METADATA)


def watch_the_health(setup: Setup) -> None:
    watch = HealthStub(setup.channel).Watch(health_pb2.HealthCheckRequest())
    next(watch)
    watch.cancel()


def raw(request: bytes, metadata: Sequence[tuple[str, str]]) -> Callable[[Setup], object]:
    return lambda setup: setup.channel.unary_unary(f"{SERVICE}/Generate")(request, metadata=metadata)


ENDS: dict[str, Callable[[Setup], object]] = {
    "answer": generate("a", "b"),
    "stream": stream("a"),
    "truncated text": generate(LONG_TEXT, truncate_input_tokens=9),
    "wrong parameters": generate("a", stopping=REFUSED),
    "wrong parameters of a stream": stream("a", stopping=REFUSED),
    "too long": generate("fox " * 300),
    "far too long": generate(LONG_TEXT),
    "too many": generate(*["a"] * (NUM_PERMITS + 1)),
    "wrong grammar": generate("a", decoding=pb.DecodingParameters(regex="(((")),
    "no soft prompt": ask_for_a_soft_prompt,
    "refused row": refuse_rows(generate("a")),
    "refused rows": refuse_rows(generate("a", "b", "c")),
    "refused row of a stream": refuse_rows(stream("a")),
    "cancelled": cancel_computing("a"),
    "cancelled batch": cancel_computing("a", "b", "c"),
    "cancelled stream": slowly(cancel_streaming),
    "cancelled while it is tokenized": cancel_tokenizing,
    "late": slowly(be_late),
    "unreadable": raw(b"\xff\xff\xff\x01", METADATA),
    "wrong token": raw(b"", ()),
    "unknown service": lambda setup: HealthStub(setup.channel).Check(
        health_pb2.HealthCheckRequest(service="no")
    ),
    "watch": watch_the_health,
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_of_a_call_outlives_it(router: Setup, end: str) -> None:
    for _ in range(NUM_CALLS):
        with contextlib.suppress(grpc.RpcError):
            ENDS[end](router)
    wait_until(lambda: look(router) == "left: []", lambda: look(router))


def look(router: Setup) -> str:
    """Return the router's report of what is left. It releases a call when it accepts the next one."""
    for _ in range(2):
        router.stub.ModelInfo(pb.ModelInfoRequest(), metadata=METADATA)
    before = len(lines(router))
    router.service.process.send_signal(signal.SIGUSR2)
    wait_until(lambda: len(lines(router)) > before)
    return lines(router)[-1]


def lines(router: Setup) -> list[str]:
    return [line for line in router.service.lines if line.startswith("left: ")]


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_refusal_is_a_status_alone(router: Setup, method: str) -> None:
    request = batch("a", stopping=REFUSED) if method == "Generate" else single("a", stopping=REFUSED)
    with Connection("127.0.0.1", router.service.grpc_port) as connection:
        connection.send(frame(Kind.SETTINGS, flags=ACK))
        connection.call(1, f"{SERVICE}/{method}", request.SerializeToString(), *METADATA)
        frames: list[Frame] = []
        for each in connection.frames():
            frames += [each] if each.stream == 1 else []
            if frames and frames[-1].flags & END_STREAM:
                break
    assert [each.kind for each in frames] == [Kind.HEADERS]


def test_clients_retry_refused_calls(router: Setup) -> None:
    """gRPC's own client retries by a service config. It takes a call with a message as answered."""
    config = {"methodConfig": [{"name": [{}], "retryPolicy": RETRY_POLICY}]}
    options = [("grpc.service_config", json.dumps(config)), ("grpc.use_local_subchannel_pool", 1)]
    before = scrape(router.http)[VALIDATION]
    with grpc.insecure_channel(f"127.0.0.1:{router.service.grpc_port}", options) as channel:
        with pytest.raises(grpc.RpcError):
            GenerationServiceStub(channel).Generate(batch("a", stopping=REFUSED), metadata=METADATA)
    assert scrape(router.http)[VALIDATION] - before == RETRY_POLICY["maxAttempts"]
