"""Traces calls through OpenTelemetry's API. Without an endpoint the spans record nothing, and neither the SDK
nor the exporter is imported."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import StartupError
from tgis.router.events import Output
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import GenerationCall, Metadata
from tgis.router.requests.parameters import PARAMETERS, Parameters
from tgis.router.requests.shutdown import CauseOf
from tgis.router.requests.span_protocols import Attributes, span_protocol

if TYPE_CHECKING:
    from tgis.router.requests.otlp import SpanExport

MAX_FINISH_REASONS = 100

PROPAGATOR = TraceContextTextMapPropagator()


def open_tracing(endpoint: str | None, service_name: str, worker: int | None = None) -> "Tracing":
    """Return a Tracing that sends spans to the OTLP collector at `endpoint`, with TLS only for `https://`.
    Spans name the router worker if there are several. Raises StartupError if the endpoint is invalid or
    OpenTelemetry's SDK is not installed."""
    if not endpoint:
        return Tracing()
    try:
        from tgis.router.requests.otlp import SpanExport
    except ImportError as error:
        raise StartupError(
            "traces need OpenTelemetry's SDK and exporter: pip install 'tgis-next[otel]'"
        ) from error
    return Tracing(SpanExport(endpoint, service_name, worker))


class Tracing:
    """Source of call spans, which are sent through `export`. Without it, they record nothing."""

    def __init__(self, export: "SpanExport | None" = None) -> None:
        self._export = export

    def call(
        self, api: ApiRules, method: str, metadata: Metadata, cause_of: CauseOf = lambda error: error
    ) -> "CallSpan":
        """Start a span of `method`, for example `Generate` or `Completion`, as a child of the caller's span
        if the metadata have one. If the caller's trace is not sampled, the span records nothing."""
        export = self._export
        span = _start(export.tracer, api, method, metadata) if export else INVALID_SPAN
        return CallSpan(span, api, cause_of)

    def close(self) -> None:
        """Send the queued spans. This blocks for a limited time."""
        if self._export is not None:
            self._export.close()


class CallSpan:
    """Span of one call, without texts. As a context manager, it sets its status from a passing exception."""

    def __init__(self, span: Span, api: ApiRules, cause_of: CauseOf) -> None:
        self._span = span
        self._cause_of = cause_of
        self._api = api
        self._started_at = time.monotonic()
        self._has_begun = self._is_stream = False
        self._input_tokens = self._cached_tokens = self._output_tokens = 0
        self._num_siblings = 1
        self._reasons: list[str] = []
        self._latencies: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span = self._span
        if span.is_recording():
            ending = span_protocol(self._api).end(self._cause_of(error), self._has_begun)
            span.set_attributes(self._result_attributes())
            span.set_attributes(ending.attributes)
            if ending.is_fault:
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    def set_call(self, call: GenerationCall, request_id: str, correlation_id: str) -> None:
        if self._span.is_recording():
            self._num_siblings = call.parameters.n
            self._is_stream = call.kind == "stream"
            self._has_begun = self._is_stream and call.api.begins_streams_at_once
            attributes: Attributes = {
                "gen_ai.request.id": request_id,
                "tgis.correlation_id": correlation_id,
                **_call_attributes(call),
                **dict(_parameter_attributes(call.parameters)),
            }
            self._span.set_attributes(attributes)

    def accept(self) -> None:
        """Record that all inputs have been validated. A stream's answer begins then."""
        self._has_begun = self._is_stream

    def finish(self, spec: SequenceSpec, last: Output) -> None:
        """Record a finished input. Each latency of a call is the maximum over its inputs."""
        if not self._span.is_recording():
            return
        self._input_tokens += len(spec.input_ids)
        self._cached_tokens += last.num_cached
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
            # An input counts once, even if it has several texts.
            "gen_ai.usage.input_tokens": self._input_tokens // self._num_siblings,
            "gen_ai.usage.cache_read.input_tokens": self._cached_tokens // self._num_siblings,
            "gen_ai.usage.output_tokens": self._output_tokens,
            "gen_ai.response.finish_reasons": self._reasons,
            **{f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()},
        }


def _start(tracer: Tracer, api: ApiRules, method: str, metadata: Metadata) -> Span:
    """Start a call's span, with attributes under the old names that dashboards use and the new ones."""
    carrier: dict[str, list[str]] = {}
    protocol = span_protocol(api)
    for key, value in metadata:
        if key in ("traceparent", "tracestate") and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    if len(carrier.get("traceparent", ())) > 1:
        carrier.clear()  # the right one of several parents is unknown
    return tracer.start_span(
        protocol.name(method),
        context=PROPAGATOR.extract(carrier, Context()),
        kind=SpanKind.SERVER,
        attributes=protocol.start(method, metadata),
    )


def _call_attributes(call: GenerationCall) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": "chat" if call.method in call.api.chat_methods else "text_completion",
        "gen_ai.provider.name": "tgis",
        "gen_ai.request.stream": call.kind == "stream",
        "tgis.input_count": len(call.texts),
        "tgis.input_bytes": sum(len(text.encode()) for text in call.texts),
    }
    if call.model_id:
        attributes["gen_ai.request.model"] = call.model_id
    if call.tenant:
        attributes["tgis.tenant"] = call.tenant
    if call.prefix_id is not None:
        attributes["tgis.prefix_id"] = call.prefix_id
    if call.adapter_id is not None:
        attributes["tgis.adapter_id"] = call.adapter_id
    return attributes


def _parameter_attributes(params: Parameters) -> Iterator[tuple[str, AttributeValue]]:
    """Yield attributes for the parameters that are set, except for the cache salt, which is secret. A seed of
    2**63 or more is recorded as text, because attributes have no unsigned type."""
    for info in PARAMETERS:
        attribute = info.span_attribute
        value = getattr(params, info.name)
        if attribute is not None and value:
            yield attribute.name, len(value) if attribute.is_count else value
    if params.temperature is not None:
        yield "gen_ai.request.temperature", params.temperature
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed if params.seed < 2**63 else str(params.seed)
    if params.n > 1:
        yield "gen_ai.request.choice.count", params.n
    if params.guided is not None and params.guided.field:
        yield "tgis.guided", params.guided.field
