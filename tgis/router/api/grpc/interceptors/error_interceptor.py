"""Intercepts every method of the public gRPC port. Refuses bytes that are not a valid message, and turns
errors into statuses by one table. For an unforeseen error, the client gets only a request id."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from tgis.log_limits import KIND
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.grpc.call_status import (
    CallRefusedError,
    Context,
    Status,
    drop_tracebacks,
    end_call,
)
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.slow_clients import SlowClients
from tgis.router.errors import (
    Code,
    OverloadedError,
    ReportedError,
    RequestError,
    RouterError,
    SlowClientError,
    internal_error,
)
from tgis.router.metrics.metric_types import Counter

logger = logging.getLogger(__name__)

STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}

PACED_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
UNREADABLE = "the request could not be decoded"
RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"

Handler = Any  # grpc types its handlers for the synchronous server only
Unary = Callable[[Any, Context], Awaitable[Any]]
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]


@dataclass(slots=True)
class Received:
    """A request as received. grpc.aio keeps this object until the call ends, so the message is dropped
    earlier."""

    message: Any
    """The message, or None if it is invalid or already answered."""
    num_bytes: int


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that wraps every method, including gRPC's own services."""

    def __init__(
        self, slow_clients: SlowClients, pacing: RefusalPacing, memory: MemoryRelease, failures: Counter
    ) -> None:
        """Create an interceptor. `failures` counts the refusals that reach no method."""
        self._slow_clients = slow_clients
        self._pacing = pacing
        self._memory = memory
        self._failures = failures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(_refuse_unknown)
        name = handler_call_details.method.rpartition("/")[2]
        make_handler, method = self._wrap(handler, name)
        return make_handler(
            method,
            request_deserializer=_with_size(handler.request_deserializer),
            response_serializer=_unless_bytes(handler.response_serializer),
        )

    def _wrap(self, handler: Handler, name: str) -> tuple[Callable[..., Handler], Unary]:
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler, self._wrap_unary(handler.unary_unary, name)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler, self._wrap_stream(handler.unary_stream, name)
        assert handler.stream_stream, "no service here has a stream of requests and one answer"
        return grpc.stream_stream_rpc_method_handler, self._wrap_stream(handler.stream_stream, name)

    def _wrap_unary(self, method: Unary, name: str) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            async def answer() -> Any:
                return await method(self._message_of(request), context)

            return await self._serve(name, answer(), request, context)

        return call

    def _wrap_stream(self, method: Stream, name: str) -> Unary:
        async def call(request: Any, context: Context) -> None:
            async def send() -> None:
                async with aclosing(method(self._message_of(request), context)) as responses:
                    await self._slow_clients.send(responses, context)

            await self._serve(name, send(), request, context)

        return call

    async def _serve(
        self, name: str, answering: Coroutine[Any, Any, Any], request: Any, context: Context
    ) -> Any:
        """Return the call's answer, or None if the call ended with a status."""
        received = request if isinstance(request, Received) else Received(None, 0)
        try:
            answer, status = await self._answer_or_status(name, answering)
            received.message = None  # free the texts while a client waits or reads slowly
            if status is not None and status.code in PACED_CODES:
                await self._pacing.wait(context.peer(), received.num_bytes)
            self._slow_clients.end()
            if status is not None:
                await end_call(context, status)
            return answer
        finally:
            self._memory.count(received.num_bytes)

    def _message_of(self, request: Any) -> Any:
        """Return the message, or the stream of messages. Raises RequestError for an invalid message."""
        if isinstance(request, AsyncIterable):
            return self._messages_of(request)
        if request.message is None:
            self._failures.add("validation")
            extra = {KIND: "gRPC unreadable"}
            logger.error("a call failed with %s: %s", Code.INVALID_ARGUMENT.name, UNREADABLE, extra=extra)
            error = RequestError(UNREADABLE)
            error.is_logged = True
            raise error
        return request.message

    async def _messages_of(self, requests: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield self._message_of(request)

    async def _answer_or_status(
        self, name: str, answering: Coroutine[Any, Any, Any]
    ) -> tuple[Any, Status | None]:
        """Return a method's answer, or the status for its error. Removes the error's frames."""
        try:
            return await answering, None
        except grpc.aio.AbortError as error:  # gRPC's own services end their calls themselves
            drop_tracebacks(error)
            return None, None
        except Exception as error:
            status = _status_of(error)
            if isinstance(error, ReportedError) and not error.is_logged:
                self._record(name, status.code, error)
            drop_tracebacks(error)
            return None, status
        except asyncio.CancelledError as error:
            drop_tracebacks(error)
            raise

    def _record(self, method: str, code: grpc.StatusCode, error: ReportedError) -> None:
        """Count and log the refusal of a call that generates nothing."""
        self._failures.add(_failure_label(error))
        level = logging.WARNING if isinstance(error, RequestError | CallRefusedError) else logging.ERROR
        logger.log(level, "%s failed with %s: %s", method, code.name, error.log_text)


async def _refuse_unknown(requests: AsyncIterable[Any], context: Context) -> None:
    """End a call of an unknown method at once and without a text, as TGIS's server does."""
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)


def _with_size(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Received]:
    def read(data: bytes) -> Received:
        try:
            return Received(deserialize(data), len(data))
        except DecodeError:
            return Received(None, len(data))

    return read


def _unless_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a serializer that passes bytes through. Some methods serialize their answers themselves."""

    def write(response: Any) -> bytes:
        return response if isinstance(response, bytes) else serialize(response)

    return write


def _failure_label(error: ReportedError) -> str:
    """Return the label of a refusal in the metric of failures."""
    if isinstance(error, OverloadedError):
        return "conc_limit"
    return "slow_reader" if isinstance(error, SlowClientError) else "validation"


def _status_of(error: Exception) -> Status:
    """Return the client's status for `error`. An unforeseen error's text has only the id of the log line."""
    if isinstance(error, CallRefusedError):
        return Status(error.code, str(error))
    if isinstance(error, RouterError):
        code = STATUS[error.code]
        text = str(error)
        retry_s = error.retry_s if isinstance(error, OverloadedError) else None
        metadata = () if retry_s is None else _retry_metadata(code.value[0], text, retry_s)
        return Status(code, text, metadata)
    request_id = secrets.token_hex(8)
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, internal_error(request_id))


def _retry_metadata(code: int, text: str, retry_s: int) -> tuple[tuple[str, str | bytes], ...]:
    """Return metadata with the time until a retry, as `google.rpc.RetryInfo` and as gRPC's own pushback."""
    retry_info = _field(1, Duration(seconds=retry_s).SerializeToString())
    detail = AnyMessage(type_url=RETRY_INFO, value=retry_info).SerializeToString()
    # The field numbers of google.rpc.Status are part of a public contract.
    status = bytes([1 << 3, code]) + _field(2, text.encode()) + _field(3, detail)
    return ("grpc-status-details-bin", status), ("grpc-retry-pushback-ms", str(1000 * retry_s))


def _field(number: int, data: bytes) -> bytes:
    assert len(data) < 128, "one byte says how long it is"
    return bytes([number << 3 | 2, len(data)]) + data
