"""Intercepts every method of the public gRPC port. Bytes that are not a valid message are refused, errors
become statuses by one table, and an unforeseen error tells a client no more than a request id."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tgis.process.memory_release import MemoryRelease
from tgis.router.api.grpc.call_status import Status, drop_tracebacks, end_call
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.retry import retry_later
from tgis.router.api.grpc.slow_clients import SlowReaders
from tgis.router.errors import Code, OverloadedError, RequestError, RouterError, internal_error
from tgis.router.metrics.metric_types import Counter

logger = logging.getLogger(__name__)

STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}

PACED_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
UNREADABLE = "the request could not be decoded"

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc types its handlers for the synchronous server only
Unary = Callable[[Any, Context], Awaitable[Any]]
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]


@dataclass(slots=True)
class Received:
    """A request as it was received. grpc.aio keeps it as long as the call, but the message only until the
    answer."""

    message: Any
    """The message, or None if it cannot be read and after the answer."""
    num_bytes: int


class Door(grpc.aio.ServerInterceptor):
    """Interceptor that wraps every method, those of gRPC's own services too."""

    def __init__(
        self, readers: SlowReaders, pacing: RefusalPacing, memory: MemoryRelease, failures: Counter
    ) -> None:
        """Create an interceptor. `failures` counts the refusals that no method sees."""
        self._readers, self._pacing, self._memory, self._failures = readers, pacing, memory, failures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(_refuse_unknown)
        make, method = self._guarded(handler)
        reader = _measuring(handler.request_deserializer)
        writer = _passing_bytes(handler.response_serializer)
        return make(method, request_deserializer=reader, response_serializer=writer)

    def _guarded(self, handler: Handler) -> tuple[Callable[..., Handler], Unary]:
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler, self._guard_unary(handler.unary_unary)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler, self._guard_stream(handler.unary_stream)
        assert handler.stream_stream, "no service here has a stream of requests and one answer"
        return grpc.stream_stream_rpc_method_handler, self._guard_stream(handler.stream_stream)

    def _guard_unary(self, method: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            async def answer() -> Any:
                return await method(self._checked(request), context)

            return await self._serve(answer(), request, context)

        return call

    def _guard_stream(self, method: Stream) -> Unary:
        async def call(request: Any, context: Context) -> None:
            async def send() -> None:
                async with aclosing(method(self._checked(request), context)) as responses:
                    await self._readers.send(responses, context)

            await self._serve(send(), request, context)

        return call

    async def _serve(self, answering: Coroutine[Any, Any, Any], request: Any, context: Context) -> Any:
        """Return the call's answer. If it has none, the call has ended with a status."""
        received = request if isinstance(request, Received) else Received(None, 0)
        try:
            answer, status = await _answer_or_status(answering)
            received.message = None  # nobody needs its texts while a client waits or reads slowly
            if status is not None and status.code in PACED_CODES:
                await self._pacing.wait(context.peer(), received.num_bytes)
            self._readers.end()
            if status is not None:
                await end_call(context, status)
            return answer
        finally:
            self._memory.count(received.num_bytes)

    def _checked(self, request: Any) -> Any:
        """Return the message, or the stream of messages. Raises RequestError if one cannot be read."""
        if isinstance(request, AsyncIterable):
            return self._all_checked(request)
        if request.message is None:
            self._failures.add("validation")
            logger.error("a call failed with %s: %s", Code.INVALID_ARGUMENT.name, UNREADABLE)
            raise RequestError(UNREADABLE)
        return request.message

    async def _all_checked(self, requests: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield self._checked(request)


async def _refuse_unknown(requests: AsyncIterable[Any], context: Context) -> None:
    """End a call of an unknown method at once and without a text, as TGIS's server does."""
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)


def _measuring(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Received]:
    def read(data: bytes) -> Received:
        try:
            return Received(deserialize(data), len(data))
        except DecodeError:
            return Received(None, len(data))

    return read


def _passing_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a serializer that leaves bytes alone: such an answer was serialized earlier, off the event
    loop."""

    def write(response: Any) -> bytes:
        return response if isinstance(response, bytes) else serialize(response)

    return write


async def _answer_or_status(answering: Coroutine[Any, Any, Any]) -> tuple[Any, Status | None]:
    """Return a method's answer, or the status for its error, without the error's frames."""
    try:
        return await answering, None
    except grpc.aio.AbortError as error:  # gRPC's own services end their calls by themselves
        drop_tracebacks(error)
        return None, None
    except Exception as error:
        status = _status_of(error)
        drop_tracebacks(error)
        return None, status
    except asyncio.CancelledError as error:
        drop_tracebacks(error)
        raise


def _status_of(error: Exception) -> Status:
    """Return the status that a client gets for `error`. For an unforeseen one it tells only the id that the
    log has."""
    if isinstance(error, RouterError):
        code, text = STATUS[error.code], str(error)
        more = retry_later(code.value[0], text) if isinstance(error, OverloadedError) else ()
        return Status(code, text, more)
    request_id = secrets.token_hex(8)
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, internal_error(request_id))
