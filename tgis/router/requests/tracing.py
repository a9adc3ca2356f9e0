"""Traces calls through OpenTelemetry's API. Without an endpoint the spans record nothing, and neither the SDK
nor the exporter is imported."""

import asyncio
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tgis.pb import generation_pb2 as pb
from tgis.router.errors import RouterError, StartupError
from tgis.router.events import Output
from tgis.router.requests.request_log import GenerationCall, Metadata
from tgis.router.sequence import Sequence

if TYPE_CHECKING:
    from tgis.router.requests.otlp import SpanExport

SERVICE = "fmaas.GenerationService"
MAX_FINISH_REASONS = 100

SERVER_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)  # of those that `_status` returns
PROPAGATOR = TraceContextTextMapPropagator()

Attributes = dict[str, AttributeValue]


def open_tracing(endpoint: str | None, service_name: str) -> "Tracing":
    """Return a tracing that sends spans to the OTLP collector at `endpoint`, encrypted for `https://` only.
    Raises StartupError for an endpoint that is not valid, and if OpenTelemetry's SDK is not installed."""
    if not endpoint:
        return Tracing()
    try:
        from tgis.router.requests.otlp import SpanExport
    except ImportError as error:
        raise StartupError(
            "traces need OpenTelemetry's SDK and exporter: pip install 'tgis-next[otel]'"
        ) from error
    return Tracing(SpanExport(endpoint, service_name))


class Tracing:
    """Source of the spans of calls, which go to `export` or record nothing."""

    def __init__(self, export: "SpanExport | None" = None) -> None:
        self._export = export

    def call(self, method: str, metadata: Metadata) -> "CallSpan":
        """Start a span of `method`, for example `Generate`, below the caller's span if the metadata name
        one. If the caller's trace is not sampled, the span records nothing."""
        return CallSpan(_start(self._export.tracer, method, metadata) if self._export else INVALID_SPAN)

    def close(self) -> None:
        """Send what is queued. This blocks for a bounded time."""
        if self._export is not None:
            self._export.close()


class CallSpan:
    """Span of one call, without texts. As a context manager it takes the status from a passing exception."""

    def __init__(self, span: Span) -> None:
        self._span, self._started_at = span, time.monotonic()
        self._input_tokens = self._output_tokens = 0
        self._reasons: list[str] = []
        self._latencies: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span = self._span
        if span.is_recording():
            status = _status(error)
            span.set_attributes(self._result_attributes())
            span.set_attribute("rpc.grpc.status_code", status.value[0])
            span.set_attribute("rpc.response.status_code", status.name)
            if status is not grpc.StatusCode.OK:
                span.set_attribute("error.type", status.name)
            if status in SERVER_FAULTS:
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    def set_request(self, request: GenerationCall, request_id: str, correlation_id: str) -> None:
        if self._span.is_recording():
            attributes: Attributes = {
                "gen_ai.request.id": request_id,
                "tgis.correlation_id": correlation_id,
                **_call_attributes(request),
                **dict(_parameter_attributes(request.params)),
            }
            self._span.set_attributes(attributes)

    def finish(self, sequence: Sequence, last: Output) -> None:
        """Record a finished input. The latencies of a call are those of its slowest input."""
        if not self._span.is_recording():
            return
        self._input_tokens += sequence.num_input_tokens
        self._output_tokens += last.num_generated
        if len(self._reasons) < MAX_FINISH_REASONS:
            self._reasons.append(last.reason.name)
        if (timings := last.timings) is None:
            return
        self._observe("time_in_queue", timings.queue_s)
        self._observe("time_in_model_inference", timings.inference_s)
        if timings.first_token_s is not None:
            self._observe("time_to_first_token", timings.first_token_s)

    def _observe(self, latency: str, seconds: float) -> None:
        self._latencies[latency] = max(seconds, self._latencies.get(latency, 0.0))

    def _result_attributes(self) -> Attributes:
        if not self._reasons:
            return {}
        latencies = {**self._latencies, "e2e": time.monotonic() - self._started_at}
        return {
            "gen_ai.usage.input_tokens": self._input_tokens,
            "gen_ai.usage.output_tokens": self._output_tokens,
            "gen_ai.response.finish_reasons": self._reasons,
            **{f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()},
        }


def _start(tracer: Tracer, method: str, metadata: Metadata) -> Span:
    """Start a call's span, with attributes under the names that dashboards use and their successors."""
    carrier: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in ("traceparent", "tracestate") and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    if len(carrier.get("traceparent", ())) > 1:
        carrier.clear()  # nothing says which of several parents is right
    return tracer.start_span(
        f"{SERVICE}/{method}",
        context=PROPAGATOR.extract(carrier, Context()),
        kind=SpanKind.SERVER,
        attributes={
            "rpc.system": "grpc",
            "rpc.system.name": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": method,
        },
    )


def _status(error: BaseException | None) -> grpc.StatusCode:
    """Return the status that the error interceptor gives a call that ends with `error`."""
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, RouterError):
        return grpc.StatusCode[error.code.name]
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL


def _call_attributes(request: GenerationCall) -> Attributes:
    is_stream = isinstance(request, pb.SingleGenerationRequest)
    inputs = [request.request] if isinstance(request, pb.SingleGenerationRequest) else request.requests
    attributes: Attributes = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tgis",
        "gen_ai.request.stream": is_stream,
        "tgis.input_count": len(inputs),
        "tgis.input_bytes": sum(len(item.text.encode()) for item in inputs),
    }
    if request.model_id:
        attributes["gen_ai.request.model"] = request.model_id
    if request.HasField("prefix_id"):
        attributes["tgis.prefix_id"] = request.prefix_id
    if request.HasField("adapter_id"):
        attributes["tgis.adapter_id"] = request.adapter_id
    return attributes


def _parameter_attributes(params: pb.Parameters) -> Iterator[tuple[str, AttributeValue]]:
    """Yield the set parameters. A seed of 2**63 or more is text, because attributes have no unsigned type."""
    sampling, stopping, guided = params.sampling, params.stopping, params.decoding.WhichOneof("guided")
    if stopping.max_new_tokens:
        yield "gen_ai.request.max_tokens", stopping.max_new_tokens
    if sampling.HasField("temperature"):
        yield "gen_ai.request.temperature", sampling.temperature
    if sampling.top_p:
        yield "gen_ai.request.top_p", sampling.top_p
    if sampling.top_k:
        yield "gen_ai.request.top_k", sampling.top_k
    if sampling.HasField("seed"):
        yield "gen_ai.request.seed", sampling.seed if sampling.seed < 2**63 else str(sampling.seed)
    if stopping.stop_sequences:
        yield "tgis.stop_sequence_count", len(stopping.stop_sequences)
    if guided is not None:
        yield "tgis.guided", guided
