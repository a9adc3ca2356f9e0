"""Traces calls. Without an endpoint, tracing costs nothing, and none of the packages that it needs is
imported."""

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from tgis.pb import generation_pb2 as pb
from tgis.router.errors import StartupError
from tgis.router.events import Output
from tgis.router.sequence import Sequence


class Span(Protocol):
    """Span of one call. As a context manager it takes the status from the exception that passes through."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def set_request(
        self,
        request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
        request_id: str,
        correlation_id: str,
    ) -> None:
        """Record the request, without its texts."""

    def finish(self, sequence: Sequence, last: Output) -> None:
        """Record that an input has ended with a stop reason."""


class Tracing(Protocol):
    """Source of spans."""

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span:
        """Start a span of `method`, for example `Generate`, below the caller's span if the metadata name
        one."""

    def close(self) -> None:
        """Send what is queued. This blocks for a bounded time."""


class NoSpan:
    """Span that records nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def set_request(
        self,
        request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
        request_id: str,
        correlation_id: str,
    ) -> None:
        pass

    def finish(self, sequence: Sequence, last: Output) -> None:
        pass


class NoTracing:
    """Tracing that is switched off."""

    def __init__(self) -> None:
        self._span = NoSpan()

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> NoSpan:
        return self._span

    def close(self) -> None:
        pass


def open_tracing(endpoint: str | None, service_name: str) -> Tracing:
    """Return a tracing that sends spans to the OTLP collector at `endpoint`: `http://host:port` or
    `host:port` without encryption, `https://` over TLS. Raises StartupError for an endpoint that is not
    valid, and if OpenTelemetry is not installed."""
    if not endpoint:
        return NoTracing()
    try:
        from tgis.router.requests.otlp import OtlpTracing
    except ImportError as error:
        raise StartupError("traces need OpenTelemetry: pip install 'tgis-next[otel]'") from error
    return OtlpTracing(endpoint, service_name)
