"""Defines the names and attributes of spans for each protocol, after OpenTelemetry's conventions."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import grpc
from opentelemetry.util.types import AttributeValue

from tgis.router.errors import RouterError
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import Metadata
from tgis.router.requests.http_statuses import http_status

SCHEME = ":scheme"
"""Metadata key for the scheme of an HTTP call, `http` or `https`. Clients cannot send such a header."""
GRPC_FAULTS = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
)  # statuses that count as the service's faults

Attributes = dict[str, AttributeValue]


class Ending(NamedTuple):
    """End of a call in the terms of its protocol."""

    attributes: Attributes
    is_fault: bool
    """True if the service is at fault and not the client."""


class SpanProtocol(Protocol):
    def name(self, method: str) -> str: ...

    def start(self, method: str, metadata: Metadata) -> Attributes: ...

    def end(self, error: BaseException | None, has_begun: bool) -> Ending:
        """Describe the end of a call. `has_begun` is True if a stream's answer began before `error`."""


class GrpcSpans:
    def __init__(self, service: str) -> None:
        self._service = service

    def name(self, method: str) -> str:
        return f"{self._service}/{method}"

    def start(self, method: str, metadata: Metadata) -> Attributes:
        return {
            "rpc.system": "grpc",
            "rpc.system.name": "grpc",
            "rpc.service": self._service,
            "rpc.method": method,
        }

    def end(self, error: BaseException | None, has_begun: bool) -> Ending:
        status = _grpc_status(error)
        attributes: Attributes = {
            "rpc.grpc.status_code": status.value[0],
            "rpc.response.status_code": status.name,
        }
        if status is not grpc.StatusCode.OK:
            attributes["error.type"] = status.name
        return Ending(attributes, status in GRPC_FAULTS)


class HttpSpans:
    def __init__(self, api: ApiRules) -> None:
        self._api = api

    def name(self, method: str) -> str:
        return f"POST {self._api.paths[method]}"

    def start(self, method: str, metadata: Metadata) -> Attributes:
        return {
            "http.request.method": "POST",
            "http.route": self._api.paths[method],
            "url.path": self._api.paths[method],
            "url.scheme": next(_texts(metadata, SCHEME), "http"),
        }

    def end(self, error: BaseException | None, has_begun: bool) -> Ending:
        status = 200 if has_begun else self._status(error)
        attributes: Attributes = {} if status is None else {"http.response.status_code": status}
        if error is not None:
            failed_late = has_begun or status is None
            attributes["error.type"] = _grpc_status(error).name if failed_late else str(status)
        final = self._status(error)
        return Ending(attributes, final is not None and final >= 500)

    def _status(self, error: BaseException | None) -> int | None:
        """Return the status of a call that ends before its answer begins, or None if it has no answer."""
        if error is None:
            return 200
        return http_status(error, self._api) if isinstance(error, Exception) else None


def span_protocol(api: ApiRules) -> SpanProtocol:
    return HttpSpans(api) if api.rpc_service is None else GrpcSpans(api.rpc_service)


def _grpc_status(error: BaseException | None) -> grpc.StatusCode:
    """Return the status that the error interceptor sets for a call that ends with `error`."""
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, RouterError):
        return grpc.StatusCode[error.code.name]
    if _is_cancellation(error):
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL


def _is_cancellation(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError | GeneratorExit)


def _texts(metadata: Iterable[tuple[str, str | bytes]], name: str) -> Iterator[str]:
    return (value for key, value in metadata if key == name and isinstance(value, str))
