"""Traces of the calls. Without an endpoint they cost nothing, and no package that they need is imported."""

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from tgis.pb import generation_pb2 as pb
from tgis.router.errors import StartupError
from tgis.router.events import Output
from tgis.router.sequence import Sequence


class Span(Protocol):
    """One call from its start to its end; as a context manager it takes the status from what passes."""

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
        """What is asked for; texts are not recorded."""

    def finish(self, sequence: Sequence, last: Output) -> None:
        """An input has ended with a stop reason."""


class Tracing(Protocol):
    """Where spans come from."""

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span:
        """A span of `method` (`Generate`, say), below the caller's where the metadata name one."""

    def close(self) -> None:
        """Sends what is queued; blocks for a bounded time."""


class NoSpan:
    """Records nothing."""

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
    """Nobody asked for traces."""

    def __init__(self) -> None:
        self._span = NoSpan()

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> NoSpan:
        return self._span

    def close(self) -> None:
        pass


def open_tracing(endpoint: str | None, service_name: str) -> Tracing:
    """Spans go to the OTLP collector at `endpoint`: `http://host:port` or `host:port` in the clear, `https://`
    over TLS. Raises StartupError for an endpoint that is none, and where OpenTelemetry is not installed."""
    if not endpoint:
        return NoTracing()
    try:
        from tgis.router.requests.otlp import OtlpTracing
    except ImportError as error:
        raise StartupError("traces need OpenTelemetry: pip install 'tgis-next[otel]'") from error
    return OtlpTracing(endpoint, service_name)
