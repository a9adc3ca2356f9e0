"""Sends the spans of calls to an OpenTelemetry collector from a bounded queue. A collector that is slow, dead
or silent delays no call, delays the shutdown by at most `CLOSE_S`, and causes at most one log line a
minute."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tgis import __version__
from tgis.pb import generation_pb2 as pb
from tgis.router.errors import RouterError, StartupError
from tgis.router.events import Output
from tgis.router.sequence import Sequence

logger = logging.getLogger(__name__)

SERVICE = "fmaas.GenerationService"
DEFAULT_PORT = 4317
MAX_QUEUED_SPANS = 2048
MAX_BATCH_SPANS = 128  # encoding a batch takes the interpreter from the event loop
MAX_ATTRIBUTE_CHARS = 256
MAX_FINISH_REASONS = 100
EXPORT_DELAY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 2.0
WARNING_INTERVAL_S = 60.0

SERVER_FAULTS = frozenset(
    (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    )
)

Attributes = dict[str, AttributeValue]


class OtlpTracing:
    """Tracing to an OpenTelemetry collector, with a thread that sends. If the caller's trace is not sampled,
    neither are its calls here."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """Create the exporter. The collector need not run yet. Raises StartupError for an endpoint that is
        not valid."""
        url = _url(endpoint)
        self._noise = _Noise(url)
        try:
            self._exporter = OTLPSpanExporter(
                url, insecure=url.startswith("http://"), timeout=EXPORT_TIMEOUT_S
            )
            provider = TracerProvider(
                resource=Resource.create({"service.name": service_name, "service.version": __version__}),
                span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
                shutdown_on_exit=False,
            )
        # one of OpenTelemetry's own environment variables is wrong
        except (ValueError, RuntimeError) as error:
            self._noise.close()
            raise StartupError(f"traces cannot be set up: {error}") from error
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=MAX_BATCH_SPANS,
            schedule_delay_millis=EXPORT_DELAY_S * 1000,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("tgis", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> "CallSpan":
        carrier: dict[str, list[str]] = {}
        for key, value in metadata:
            if key in ("traceparent", "tracestate") and isinstance(value, str):
                carrier.setdefault(key, []).append(value)
        if len(carrier.get("traceparent", ())) > 1:
            carrier.clear()  # nothing says which of several parents is right
        span = self._tracer.start_span(
            f"{SERVICE}/{method}",
            context=self._propagator.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes=_method_attributes(method),
        )
        return CallSpan(span)

    def close(self) -> None:
        """Send the queued spans for at most CLOSE_S, and drop the rest."""
        flushing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        flushing.start()
        flushing.join(CLOSE_S * 0.75)
        if flushing.is_alive():
            self._exporter.shutdown()  # this ends the export and the pause that the processor hangs in
            flushing.join(CLOSE_S * 0.25)
        if not flushing.is_alive():
            self._noise.close()


class CallSpan:
    """Span of one call. It records no texts."""

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
        span, status = self._span, _status(error)
        if span.is_recording():
            span.set_attributes(self._result_attributes())
            span.set_attribute("rpc.grpc.status_code", status.value[0])
            span.set_attribute("rpc.response.status_code", status.name)
            if status is not grpc.StatusCode.OK:
                span.set_attribute("error.type", status.name)
            if status in SERVER_FAULTS:
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    def set_request(
        self,
        request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
        request_id: str,
        correlation_id: str,
    ) -> None:
        if self._span.is_recording():
            attributes: Attributes = {
                "gen_ai.request.id": request_id,
                "tgis.correlation_id": correlation_id,
                **_call_attributes(request),
                **dict(_parameter_attributes(request.params)),
            }
            self._span.set_attributes(attributes)

    def finish(self, sequence: Sequence, last: Output) -> None:
        """Record the end of an input. The latencies of a call are those of its slowest input."""
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


class _Noise(logging.Handler):
    """Log handler between OpenTelemetry's loggers, which report every failed attempt, and ours, which gets
    one line per WARNING_INTERVAL_S."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url, self._next_at = url, 0.0
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("opentelemetry.exporter", "opentelemetry.sdk")):
            return  # such records are about a client's malformed headers
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + WARNING_INTERVAL_S
            logger.warning(
                "traces do not all reach %s: %s", self._url, record.getMessage()[:MAX_ATTRIBUTE_CHARS]
            )

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()


def _url(endpoint: str) -> str:
    """Return the endpoint as a URL with scheme, host and port only. Raises StartupError."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or parts.username is not None:
        raise StartupError("the OTLP endpoint must be host:port, http://host:port or https://host:port")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or DEFAULT_PORT}"


def _status(error: BaseException | None) -> grpc.StatusCode:
    """Return the status that the error interceptor gives a call that ends with `error`."""
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, RouterError):
        return grpc.StatusCode[error.code.name]
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL


def _method_attributes(method: str) -> Attributes:
    """Return the attributes under the names that dashboards use today and under their successors."""
    return {"rpc.system": "grpc", "rpc.system.name": "grpc", "rpc.service": SERVICE, "rpc.method": method}


def _call_attributes(request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest) -> Attributes:
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
    """Yield the attributes of parameters that are set. A seed of 2**63 or more is sent as text, because
    attributes have no unsigned type."""
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
