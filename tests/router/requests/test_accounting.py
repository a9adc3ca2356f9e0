"""Checks the log lines and spans of calls with a real router and a real collector."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.support.accounts import scrape
from tests.support.router.expected_answers import expected_text, expected_tokens
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.trace_collector import PARENT_ID, TRACE_ID, TRACEPARENT, Collector, values
from tgis.pb import generation_pb2 as pb
from tgis.router.api.fmaas.messages import read_batch
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output, Timings
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.shutdown import STOPPED
from tgis.router.requests.tracing import Tracing
from tgis.router.sequence import Stopping, StopReason

PROMPT = "girl bread fox"
CORRELATION = (("x-correlation-id", "abc-123"),)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    """Return a function that starts a router with JSON logs and the given flags."""
    running: list[Setup] = []

    def run(*flags: str) -> Setup:
        running.append(start_router(tmp_path, 1, "--json-output", *flags))
        return running[-1]

    yield run
    for setup in running:
        stop_router(setup)


def lines(setup: Setup, count: int) -> list[dict[str, object]]:
    """Wait for `count` log lines of requests, and return their records."""
    deadline = time.monotonic() + 30
    while True:
        records = [json.loads(line) for line in setup.service.lines if line.startswith("{")]
        matching = [record for record in records if "request_id" in record]
        if len(matching) >= count:
            assert len(matching) == count, matching
            return matching
        assert time.monotonic() < deadline, setup.service.output
        time.sleep(0.02)


def test_cached_tokens_are_counted_once_per_input() -> None:
    metrics = Metrics(MetricLimits(64, 64, 1))
    call = read_batch(batch("a", "b", "c"))
    timings = Timings(queue_s=0.0, first_token_s=None, total_s=0.1)
    with Accounting(metrics, Tracing(), 0).open(call) as account:
        for index, num_cached in enumerate((0, 16, 48)):
            with account.input(index, SequenceSpec((1,) * 60, Stopping(max_new_tokens=1))) as record:
                record(Output(("a",), (), 1))
                record(Output((), (), 1, StopReason.MAX_TOKENS, "", timings, num_cached))
    shown = metrics.render().decode()
    for sample in ('bucket{le="1.0"} 1', 'bucket{le="16.0"} 2', 'bucket{le="48.0"} 3', "count 3", "sum 64"):
        assert f"tgi_request_cached_tokens_{sample}.0\n" in shown


@pytest.mark.parametrize(
    ("is_stop", "is_finished", "failures"),
    [
        (True, False, {"generate": 1}),
        (False, False, {"cancelled": 3}),
        (True, True, {}),
    ],
)
def test_a_stop_of_the_service_is_no_cancellation(
    is_stop: bool, is_finished: bool, failures: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The label is that of other calls that the service ends with UNAVAILABLE, once for each call."""
    metrics = Metrics(MetricLimits(64, 64, 1))
    accounting = Accounting(metrics, Tracing(), 0)
    spec = SequenceSpec((1,) * 60, Stopping(max_new_tokens=1))
    texts = batch("a") if is_finished else batch("a", "b", "c")
    with suppress(asyncio.CancelledError), accounting.open(read_batch(texts)) as account:
        account.accept(1, [spec])
        with account.input(0, spec) as record:
            if is_finished:
                timings = Timings(queue_s=0.0, first_token_s=None, total_s=0.1)
                record(Output((), (), 1, StopReason.MAX_TOKENS, "", timings, 0))
            accounting.shutdown.cancels_calls = is_stop
            raise asyncio.CancelledError
    family = "tgi_request_failure_total{"
    samples = (line.split() for line in metrics.render().decode().splitlines() if line.startswith(family))
    counts = {name.split('"')[1]: int(float(count)) for name, count in samples if float(count)}
    assert counts == failures
    failed = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    stopped = [f"Sub-request 1 from batch of 3 failed with UNAVAILABLE: {STOPPED}"]
    assert failed == (stopped if is_stop and not is_finished else [])


def test_one_line_per_input(start: Callable[..., Setup]) -> None:
    setup = start()
    [response] = setup.stub.Generate(batch(PROMPT, stopping=stopping(7)), metadata=CORRELATION).responses
    [line] = lines(setup, 1)
    num, reason = response.generated_token_count, pb.StopReason.Name(response.stop_reason)
    size = len(response.text.encode())
    assert line["message"] == f"Request generated {num} tokens before {reason}, output {size} bytes"
    assert line["level"] == "INFO"
    wanted = {"correlation_id": "abc-123", "input_bytes": len(PROMPT), "output_tokens": num}
    assert wanted.items() <= line.items()
    assert line["input_tokens"] == response.input_token_count
    times = [line[f"{name}_time_ms"] for name in ("validation", "queue", "inference", "total")]
    assert all(isinstance(seconds, float) and seconds >= 0 for seconds in times)
    assert sum(times[:3]) <= times[3] + 1  # type: ignore[arg-type]

    setup.stub.Generate(batch("a", "b", stopping=stopping(1)))
    list(setup.stub.GenerateStream(single("c", stopping=stopping(1))))
    kinds = [str(line["message"]).split(" generated")[0] for line in lines(setup, 4)[1:]]
    assert sorted(kinds[:2]) == ["Sub-request 1 from batch of 2", "Sub-request 2 from batch of 2"]
    assert kinds[2] == "Streaming response"


def test_failures_and_cancellations_are_one_line_each(start: Callable[..., Setup]) -> None:
    setup = start()
    with pytest.raises(grpc.RpcError):
        setup.stub.Generate(batch("a", "b", stopping=stopping(1, min_new_tokens=2)))
    [line] = lines(setup, 1)
    assert line["level"] == "ERROR"
    text = "Batch of 2 failed with INVALID_ARGUMENT: min_new_tokens must be <= max_new_tokens"
    assert line["message"] == text
    setup.shards[0].step_s = 0.05
    for cancel in (cancel_stream, cancel_unary):
        cancel(setup)
    cancelled = lines(setup, 3)[1:]
    assert [line["level"] for line in cancelled] == ["WARNING"] * 2
    assert all(line["stop_reason"] == "CANCELLED" for line in cancelled)


def cancel_stream(setup: Setup) -> None:
    call = setup.stub.GenerateStream(single("a", stopping=stopping(190, min_new_tokens=190)))
    next(call)
    next(call)
    call.cancel()


def cancel_unary(setup: Setup) -> None:
    call = setup.stub.Generate.future(batch("a", stopping=stopping(190, min_new_tokens=190)))
    deadline = time.monotonic() + 30
    while not scrape(setup.http)["tgi_requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    call.cancel()


def test_texts_are_shown_as_far_as_allowed(start: Callable[..., Setup]) -> None:
    text = expected_text(setup := start(), expected_tokens(setup, PROMPT, 30))
    setup.stub.Generate(batch(PROMPT, stopping=stopping(30)))
    lines(setup, 1)
    assert PROMPT not in setup.service.output
    assert text[:4] not in setup.service.output

    setup = start("--log-text-chars", "9")
    setup.stub.Generate(batch(PROMPT, stopping=stopping(30)))
    [line] = lines(setup, 1)
    assert line["input"] == PROMPT[:9]
    assert str(line["message"]).endswith(f"bytes: {text[:9]}")


def test_spans_reach_the_collector(start: Callable[..., Setup], collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    setup = start("--otlp-endpoint", f"http://{address}", "--otlp-service-name", "ours")
    metadata = (("traceparent", TRACEPARENT), *CORRELATION)
    [response] = setup.stub.Generate(batch(PROMPT), metadata=metadata).responses
    with pytest.raises(grpc.RpcError):
        setup.stub.Generate(batch(PROMPT, stopping=stopping(1, min_new_tokens=2)))
    list(setup.stub.GenerateStream(single(PROMPT)))
    setup.stub.Tokenize(pb.BatchedTokenizeRequest())
    setup.stub.ModelInfo(pb.ModelInfoRequest())
    stop_router(setup)  # sends the queued spans
    assert servicer.resource["service.name"] == "ours"
    first, refused, stream, *others = servicer.spans
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert not stream.parent_span_id
    attributes = values(first.attributes)
    assert attributes["gen_ai.usage.output_tokens"] == response.generated_token_count
    assert attributes["gen_ai.usage.input_tokens"] == response.input_token_count
    assert values(refused.attributes)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    names = [span.name.rsplit("/")[1] for span in (first, refused, stream, *others)]
    assert names == ["Generate", "Generate", "GenerateStream", "Tokenize", "ModelInfo"]
    assert PROMPT.encode() not in b"".join(request.SerializeToString() for request in servicer.requests)


def test_a_dead_collector_stops_nothing(start: Callable[..., Setup]) -> None:
    setup = start("--otlp-endpoint", "http://127.0.0.1:9")
    assert setup.stub.Generate(batch(PROMPT)).responses
    assert stop_router(setup) == 0
