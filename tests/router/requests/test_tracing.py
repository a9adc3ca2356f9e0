"""Checks spans at a real collector behind a real socket, and the cost of a collector that does not answer."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace

import grpc
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.trace_collector import PARENT_ID, TRACE_ID, TRACEPARENT, Collector, values
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from tgis.router.api.fmaas.messages import read_batch, read_single
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.openai.errors import describe
from tgis.router.api.openai.rules import OPENAI
from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import (
    GenerationError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RouterError,
    SlowClientError,
    StartupError,
    UnavailableError,
)
from tgis.router.events import Output, Timings
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.otlp import CLOSE_S, EXPORT_TIMEOUT_S, MAX_BATCH_SPANS, MAX_QUEUED_SPANS
from tgis.router.requests.parameters import Parameters
from tgis.router.requests.request_log import correlation_id
from tgis.router.requests.shutdown import Shutdown
from tgis.router.requests.tracing import Tracing, open_tracing
from tgis.router.sequence import Stopping, StopReason

SECRET = "a-text-nobody-may-see"
SERVER_SPAN = trace_pb2.Span.SPAN_KIND_SERVER


@pytest.fixture(autouse=True)
def _no_export_goes_on() -> Iterator[None]:
    """A slow machine may need longer than a closed tracing waits."""
    yield
    for thread in threading.enumerate():
        if thread.name == "traces":
            thread.join(60)
    loggers = logging.getLogger("opentelemetry")
    for handler in loggers.handlers[:]:
        handler.close()


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """Open a port that accepts connections and never sends a byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"


def batch(*texts: str, **params: object) -> pb.BatchedGenerationRequest:
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return pb.BatchedGenerationRequest(
        model_id="a-model", prefix_id="a-prefix", requests=requests, params=pb.Parameters(**params)
    )


def single() -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=SECRET))


def ended(
    prompt_len: int, num_generated: int, reason: StopReason, *times: float, num_cached: int = 0
) -> tuple[SequenceSpec, Output]:
    """Return a spec and its last output. `times` are the seconds until first step, first token and end."""
    spec = SequenceSpec((1,) * prompt_len, Stopping(max_new_tokens=9))
    return spec, Output((SECRET,), (), num_generated, reason, "", Timings(*times), num_cached)


def one_call(tracing: Tracing, **metadata: str) -> None:
    with tracing.call(FMAAS, "Generate", metadata.items()) as span:
        span.set_call(read_single(single()), "r1", "<none>")
        span.finish(*ended(1, 1, StopReason.MAX_TOKENS, 0.0, 0.1, 0.2))


def test_a_call_as_the_collector_sees_it(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing = open_tracing(f"http://{address}", "my-service")
    metadata = [
        ("user-agent", "test"),
        ("traceparent", TRACEPARENT),
        ("tracestate", "vendor=value,other=1"),
        ("traceparent-bin", b"\xff"),
    ]
    request = batch(
        SECRET,
        "é",
        method=pb.SAMPLE,
        sampling=pb.SamplingParameters(temperature=0.5, top_k=7, top_p=0.25, seed=11),
        stopping=pb.StoppingCriteria(max_new_tokens=30, stop_sequences=[SECRET, "b"]),
        decoding=pb.DecodingParameters(regex=SECRET),
    )
    before = time.time_ns()
    with tracing.call(FMAAS, "Generate", metadata) as span:
        span.set_call(read_batch(request), "request-1", "correlation-1")
        span.finish(*ended(5, 3, StopReason.EOS_TOKEN, 0.5, 0.75, 1.0, num_cached=4))
        span.finish(*ended(2, 8, StopReason.MAX_TOKENS, 0.25, 1.5, 2.0, num_cached=1))
    tracing.close()
    [span_read] = servicer.spans
    assert (span_read.name, span_read.kind) == ("fmaas.GenerationService/Generate", SERVER_SPAN)
    assert (span_read.trace_id.hex(), span_read.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span_read.trace_state == "vendor=value,other=1"
    assert before <= span_read.start_time_unix_nano <= span_read.end_time_unix_nano <= time.time_ns()
    assert span_read.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert not span_read.events
    attributes = values(span_read.attributes)
    assert 0 <= attributes.pop("gen_ai.latency.e2e") < 1  # type: ignore[operator]
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.system.name": "grpc",
        "rpc.service": "fmaas.GenerationService",
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tgis",
        "gen_ai.request.id": "request-1",
        "gen_ai.request.model": "a-model",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.response.finish_reasons": ["EOS_TOKEN", "MAX_TOKENS"],
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.time_in_model_inference": 1.75,
        "tgis.correlation_id": "correlation-1",
        "tgis.prefix_id": "a-prefix",
        "tgis.input_count": 2,
        "tgis.input_bytes": len(SECRET) + 2,
        "tgis.stop_sequence_count": 2,
        "tgis.guided": "regex",
    }
    assert servicer.resource["service.name"] == "my-service"
    assert "service.version" in servicer.resource
    assert SECRET.encode() not in servicer.requests[0].SerializeToString()


@pytest.mark.parametrize("worker", [None, 2])
def test_spans_name_the_router_worker(collector: tuple[Collector, str], worker: int | None) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s", worker)
    one_call(tracing)
    tracing.close()
    name = servicer.resource.get("service.instance.id")
    assert (name == "router-worker-2") == (worker is not None)


def test_parameters_beside_the_messages(collector: tuple[Collector, str]) -> None:
    """Expect no cache salt and no biases in spans: a salt is secret, and token ids reveal text."""
    servicer, address = collector
    tracing = open_tracing(address, "s")
    params = Parameters(
        logit_bias=((11, -100.0), (12, 1.5), (13, 2.0)),
        min_p=0.25,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        watermark=True,
        n=3,
        cache_salt=SECRET.encode(),
    )
    plain = read_single(single())
    for call in (replace(plain, parameters=params, tenant="team-7"), plain):
        with tracing.call(FMAAS, "Generate", ()) as span:
            span.set_call(call, "r", "c")
    tracing.close()
    traced, bare = (values(each.attributes) for each in servicer.spans)
    assert {key: value for key, value in traced.items() if key not in bare} == {
        "gen_ai.request.presence_penalty": -0.5,
        "gen_ai.request.frequency_penalty": 1.5,
        "gen_ai.request.choice.count": 3,
        "tgis.logit_bias_count": 3,
        "tgis.stop_token_id_count": 2,
        "tgis.min_p": 0.25,
        "tgis.ignore_eos": True,
        "tgis.watermark": True,
        "tgis.tenant": "team-7",
    }
    assert SECRET.encode() not in servicer.requests[0].SerializeToString()


@pytest.mark.parametrize(
    ("error", "code", "is_fault"),
    [
        (RequestError(SECRET), grpc.StatusCode.INVALID_ARGUMENT, False),
        (OverloadedError(SECRET), grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (UnavailableError(SECRET), grpc.StatusCode.UNAVAILABLE, True),
        (GenerationError(SECRET), grpc.StatusCode.INTERNAL, True),
        (RouterError(SECRET), grpc.StatusCode.INTERNAL, True),
        (KeyError(SECRET), grpc.StatusCode.INTERNAL, True),
        (asyncio.CancelledError(SECRET), grpc.StatusCode.CANCELLED, False),
    ],
)
def test_an_error_becomes_the_status(
    collector: tuple[Collector, str], error: BaseException, code: grpc.StatusCode, is_fault: bool
) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    with suppress(type(error)), tracing.call(FMAAS, "Generate", ()) as span:
        span.set_call(read_single(single()), "r", "c")
        raise error
    tracing.close()
    [read] = servicer.spans
    attributes = values(read.attributes)
    assert attributes["rpc.grpc.status_code"] == code.value[0]
    assert attributes["rpc.response.status_code"] == attributes["error.type"] == code.name
    codes = trace_pb2.Status
    assert read.status.code == (codes.STATUS_CODE_ERROR if is_fault else codes.STATUS_CODE_UNSET)
    assert "gen_ai.usage.output_tokens" not in attributes
    assert SECRET.encode() not in read.SerializeToString()


def openai_call(kind: str = "single") -> GenerationCall:
    return replace(
        read_single(single()),
        method="ChatCompletion",
        kind=kind,
        metadata=((":scheme", "https"), ("traceparent", TRACEPARENT)),
        model_id="a-model",
        api=OPENAI,
    )


def test_a_call_over_http_as_the_collector_sees_it(collector: tuple[Collector, str]) -> None:
    """Expect the attributes of OpenTelemetry's HTTP conventions, and none of its RPC conventions."""
    servicer, address = collector
    tracing, call = open_tracing(address, "s"), openai_call()
    with tracing.call(call.api, call.method, call.metadata) as span:
        span.set_call(call, "r", "c")
        span.finish(*ended(5, 3, StopReason.EOS_TOKEN, 0.5, 0.75, 1.0))
    with tracing.call(OPENAI, "Tokenize", [("user-agent", "x")]):
        pass
    tracing.close()
    read, tokenize = servicer.spans
    assert (read.name, read.kind) == ("POST /v1/chat/completions", SERVER_SPAN)
    assert (read.trace_id.hex(), read.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    attributes = values(read.attributes)
    shared = {key: value for key, value in attributes.items() if not key.startswith(("gen_ai.", "tgis."))}
    assert shared == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "https",
        "http.response.status_code": 200,
    }
    assert attributes["gen_ai.operation.name"] == "chat"
    assert (tokenize.name, values(tokenize.attributes)["url.scheme"]) == ("POST /tokenize", "http")


@pytest.mark.parametrize(
    "error",
    [
        RequestError(SECRET),
        NotFoundError(SECRET),
        OverloadedError(SECRET),
        SlowClientError(),
        UnavailableError(SECRET),
        GenerationError(SECRET),
        KeyError(SECRET),
    ],
)
def test_an_error_over_http_becomes_the_status_that_the_client_gets(
    collector: tuple[Collector, str], error: Exception
) -> None:
    servicer, address = collector
    tracing, status = open_tracing(address, "s"), describe(error)[0]
    for kind in ("single", "stream"):
        call = openai_call(kind)
        with suppress(type(error)), tracing.call(call.api, call.method, call.metadata) as span:
            span.set_call(call, "r", "c")
            raise error
    tracing.close()
    for read in servicer.spans:
        attributes = values(read.attributes)
        assert (attributes["http.response.status_code"], attributes["error.type"]) == (status, str(status))
        assert (read.status.code == trace_pb2.Status.STATUS_CODE_ERROR) == (status >= 500)
        assert SECRET.encode() not in read.SerializeToString()


def test_a_stop_of_the_service_is_its_own_fault(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing, shutdown = open_tracing(address, "s"), Shutdown()
    shutdown.cancels_calls = True
    for call in (read_single(single()), openai_call("single")):
        with (
            suppress(asyncio.CancelledError),
            tracing.call(call.api, call.method, call.metadata, shutdown.cause_of) as span,
        ):
            span.set_call(call, "r", "c")
            raise asyncio.CancelledError
    tracing.close()
    assert [values(read.attributes)["error.type"] for read in servicer.spans] == ["UNAVAILABLE", "503"]
    assert {read.status.code for read in servicer.spans} == {trace_pb2.Status.STATUS_CODE_ERROR}


def test_span_of_an_http_answer_that_fails_midway(collector: tuple[Collector, str]) -> None:
    """Expect status 200 for a stream that has begun, and none for a client that left before its answer."""
    servicer, address = collector
    tracing = open_tracing(address, "s")
    ends = [("stream", GenerationError(SECRET)), ("stream", asyncio.CancelledError())]
    for kind, error in [*ends, ("single", asyncio.CancelledError())]:
        call = openai_call(kind)
        with suppress(type(error)), tracing.call(call.api, call.method, call.metadata) as span:
            span.set_call(call, "r", "c")
            span.accept()
            raise error
    tracing.close()
    recorded = [values(read.attributes) for read in servicer.spans]
    assert [(one.get("http.response.status_code"), one["error.type"]) for one in recorded] == [
        (200, "INTERNAL"),
        (200, "CANCELLED"),
        (None, "CANCELLED"),
    ]
    codes = trace_pb2.Status
    assert [read.status.code for read in servicer.spans] == [
        codes.STATUS_CODE_ERROR,
        codes.STATUS_CODE_UNSET,
        codes.STATUS_CODE_UNSET,
    ]


async def test_a_stream_that_is_left_is_cancelled(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")

    async def answers() -> AsyncIterator[int]:
        with tracing.call(FMAAS, "GenerateStream", ()):
            yield 1
            yield 2

    async with aclosing(answers()) as stream:  # type: ignore[type-var]
        await anext(stream)
    await asyncio.to_thread(tracing.close)
    [read] = servicer.spans
    assert read.name == "fmaas.GenerationService/GenerateStream"
    assert values(read.attributes)["rpc.response.status_code"] == "CANCELLED"


class Answers(GenerationServiceServicer):
    """Servicer that only traces its calls."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self.correlation_ids: list[str] = []

    async def ModelInfo(
        self, request: pb.ModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInfoResponse:
        metadata = context.invocation_metadata()
        self.correlation_ids.append(correlation_id(metadata, FMAAS))
        with self.tracing.call(FMAAS, "ModelInfo", metadata):
            return pb.ModelInfoResponse()


def model_info(address: str, *metadata: tuple[str, str | bytes]) -> None:
    with grpc.insecure_channel(address) as channel:
        GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), metadata=metadata)


async def test_metadata_of_a_real_call(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    server, answers = grpc.aio.server(), Answers(tracing)
    add_GenerationServiceServicer_to_server(answers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ours = ("traceparent", TRACEPARENT), ("x-correlation-id", "abc-1")
    await asyncio.to_thread(model_info, f"127.0.0.1:{port}", *ours, ("other-bin", b"\xff"))
    await asyncio.to_thread(model_info, f"127.0.0.1:{port}")
    await server.stop(None)
    await asyncio.to_thread(tracing.close)
    assert answers.correlation_ids == ["abc-1", "<none>"]
    assert [span.parent_span_id.hex() for span in servicer.spans] == [PARENT_ID, ""]


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        "\x00" * 55,
        TRACEPARENT[:-1],
        TRACEPARENT + "-extra",
        TRACEPARENT.replace("00-", "ff-", 1),
        TRACEPARENT.upper().replace("0A", "0G"),
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        "é" * 55,
        "-" * 8000,
    ],
)
def test_a_malformed_parent_is_none(collector: tuple[Collector, str], traceparent: str) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    one_call(tracing, traceparent=traceparent, tracestate="a=b")
    tracing.close()
    [read] = servicer.spans
    assert read.parent_span_id == b""
    assert read.trace_id.hex() not in (TRACE_ID, "0" * 32)
    assert read.trace_state == ""


@pytest.mark.parametrize(
    "tracestate", ["no pairs at all", "=", "a=b," * 40, "k=" + "v" * 9000, "\n", "a=b,a=c"]
)
def test_a_malformed_state_costs_no_parent(
    collector: tuple[Collector, str], tracestate: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    with caplog.at_level(logging.DEBUG):
        one_call(tracing, traceparent=TRACEPARENT, tracestate=tracestate)
        tracing.close()
    [read] = servicer.spans
    assert read.parent_span_id.hex() == PARENT_ID
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_two_parents_are_none(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    other = TRACEPARENT.replace("b7ad", "c8be")
    with tracing.call(FMAAS, "Generate", [("traceparent", TRACEPARENT), ("traceparent", other)]):
        pass
    tracing.close()
    [read] = servicer.spans
    assert read.parent_span_id == b""


def test_unsampled_traces_are_not_sent(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    one_call(tracing, traceparent=TRACEPARENT[:-1] + "0")
    one_call(tracing, traceparent=TRACEPARENT)
    tracing.close()
    assert [span.parent_span_id.hex() for span in servicer.spans] == [PARENT_ID]


def test_extreme_values_reach_the_collector(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    tracing = open_tracing(address, "s")
    request = batch(
        *["x"] * 1000,
        sampling=pb.SamplingParameters(seed=2**64 - 1, temperature=float("nan"), top_p=float("inf")),
        stopping=pb.StoppingCriteria(max_new_tokens=2**32 - 1),
    )
    request.model_id = "\0" * 1_000_000
    with tracing.call(FMAAS, "Generate", ()) as span:
        span.set_call(read_batch(request), "r", "\u202e" * 100_000)
        for _ in range(1000):
            span.finish(*ended(1, 1, StopReason.MAX_TOKENS, 0.0, 0.0, 0.0))
    tracing.close()
    [read] = servicer.spans
    attributes = values(read.attributes)
    assert attributes["gen_ai.request.seed"] == str(2**64 - 1)
    assert attributes["gen_ai.request.max_tokens"] == 2**32 - 1
    assert attributes["gen_ai.usage.output_tokens"] == 1000
    assert read.ByteSize() < 10_000


def assert_costs_nothing(tracing: Tracing, caplog: pytest.LogCaptureFixture) -> None:
    """Trace 1,000 calls and close the tracing, with a collector that does not answer."""
    with caplog.at_level(logging.DEBUG):
        slowest_s = 0.0
        for _ in range(1000):
            started = time.monotonic()
            one_call(tracing, traceparent=TRACEPARENT)
            slowest_s = max(slowest_s, time.monotonic() - started)
        time.sleep(0.5)
        started = time.monotonic()
        tracing.close()
        close_s = time.monotonic() - started
    # A call or a close that waited for an unanswered export would take at least this long.
    assert slowest_s < EXPORT_TIMEOUT_S
    assert close_s < CLOSE_S + EXPORT_TIMEOUT_S
    records = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert len(records) <= 1
    for record in records:
        assert (record.name, record.levelname, record.exc_info) == (
            "tgis.router.requests.otlp",
            "WARNING",
            None,
        )
        assert "\n" not in record.getMessage()


def test_a_dead_collector_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as (_, address):
        pass
    tracing = open_tracing(address, "s")
    assert_costs_nothing(tracing, caplog)
    assert any(f"do not reach http://{address}" in message for message in caplog.messages)


def test_a_silent_collector_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as (_, address):
        assert_costs_nothing(open_tracing(address, "s"), caplog)


def test_a_collector_that_never_answers_costs_nothing(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, address = collector
    servicer.open_gate.clear()
    assert_costs_nothing(open_tracing(address, "s"), caplog)


def test_the_queue_is_bounded(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgis.router.requests.otlp.CLOSE_S", 60)
    servicer, address = collector
    servicer.open_gate.clear()
    tracing = open_tracing(address, "s")
    with caplog.at_level(logging.DEBUG):
        for _ in range(MAX_QUEUED_SPANS + 2 * MAX_BATCH_SPANS):
            with tracing.call(FMAAS, "ModelInfo", ()):
                pass
        assert servicer.asked.wait(60)
        servicer.open_gate.set()
        tracing.close()
    assert MAX_QUEUED_SPANS / 2 < len(servicer.spans) <= MAX_QUEUED_SPANS + MAX_BATCH_SPANS
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    loggers = logging.getLogger("opentelemetry")
    assert loggers.propagate
    assert not loggers.handlers


def first_bytes(endpoint: Callable[[str], str]) -> bytes:
    with listening() as (listener, address):
        tracing = open_tracing(endpoint(address), "s")
        one_call(tracing)
        closing = threading.Thread(target=tracing.close)
        closing.start()
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(60)
            read = connection.recv(3)
        closing.join()
        return read


def test_the_scheme_says_whether_it_is_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgis.router.requests.otlp.CLOSE_S", 0.4)
    assert first_bytes(lambda address: f"https://{address}") == b"\x16\x03\x01"
    assert first_bytes(lambda address: f"http://{address}/") == b"PRI"
    assert first_bytes(lambda address: address) == b"PRI"


@pytest.mark.parametrize(
    "endpoint", ["grpc://host:1", "http://", "host:port", "host:99999", "http://a:b@host:1", "[::1", "://x"]
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(StartupError, match="OTLP endpoint must be"):
        open_tracing(endpoint, "s")
    assert not logging.getLogger("opentelemetry").handlers


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_without_an_endpoint_neither_sdk_nor_exporter_is_imported() -> None:
    script = """
import sys
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.requests.tracing import open_tracing
tracing = open_tracing(None, "s")
with tracing.call(FMAAS, "Generate", ()) as span:
    span.set_call(None, "", "")
    span.finish(None, None)
tracing.close()
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    assert run_python(script) == "[]\n"


def test_the_missing_packages_are_named() -> None:
    script = """
import sys
sys.modules["opentelemetry.sdk"] = None
from tgis.pb.generation_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from tgis.router.errors import StartupError
from tgis.router.requests.tracing import open_tracing
try:
    open_tracing("localhost:4317", "s")
except StartupError as error:
    print(error)
"""
    assert (
        run_python(script) == "traces need OpenTelemetry's SDK and exporter: pip install 'tgis-next[otel]'\n"
    )


def test_no_span_hides_no_error() -> None:
    with pytest.raises(KeyError), Tracing().call(FMAAS, "Generate", ()):
        raise KeyError
