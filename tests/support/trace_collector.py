"""Collector of OpenTelemetry traces on a real port."""

import threading

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer
from opentelemetry.proto.trace.v1 import trace_pb2

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Collector(TraceServiceServicer):
    """Collector that records what it receives; it starts to answer when `open_gate` is set."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.asked = threading.Event()

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.asked.set()
        self.open_gate.wait(20)
        self.requests.append(request)
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[trace_pb2.Span]:
        groups = [scope for request in self.requests for scope in request.resource_spans]
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]

    @property
    def resource(self) -> dict[str, object]:
        return values(self.requests[0].resource_spans[0].resource.attributes)


def values(attributes: object) -> dict[str, object]:
    return {pair.key: value(pair.value) for pair in attributes}  # type: ignore[attr-defined]


def value(wrapped: object) -> object:
    kind = wrapped.WhichOneof("value")  # type: ignore[attr-defined]
    inner = getattr(wrapped, kind)
    return [value(one) for one in inner.values] if kind == "array_value" else inner
