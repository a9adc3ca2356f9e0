"""What stands before every method of the public gRPC port: bytes that are no message are refused, errors
become statuses by one table, and nothing unforeseen tells a client more than a request id."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tgis.router.errors import Code, OverloadedError, RequestError, RouterError, internal_error
from tgis.router.retry import retry_later
from tgis.router.series import Counter
from tgis.router.slow_readers import SlowReaders

logger = logging.getLogger(__name__)

STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}

UNREADABLE = "the request could not be decoded"

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc types its handlers for the synchronous server only
Unary = Callable[[Any, Context], Awaitable[Any]]
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]


class _Malformed:
    """Stands for a request whose bytes could not be read."""


class Door(grpc.aio.ServerInterceptor):
    """Wraps every method there is, those of gRPC's own services too."""

    def __init__(self, readers: SlowReaders, failures: Counter) -> None:
        """`failures` counts what no method gets to see."""
        self._readers, self._failures = readers, failures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(_refuse_unknown)
        make, method = self._guarded(handler)
        reader = _tolerant(handler.request_deserializer)
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
            try:
                answer = await method(self._checked(request), context)
            except Exception as error:
                self._readers.end()
                return await _abort(context, error)
            self._readers.end()
            return answer

        return call

    def _guard_stream(self, method: Stream) -> Unary:
        async def call(request: Any, context: Context) -> None:
            try:
                async with aclosing(method(self._checked(request), context)) as responses:
                    await self._readers.send(responses, context)
            except Exception as error:
                self._readers.end()
                await _abort(context, error)
            self._readers.end()

        return call

    def _checked(self, request: Any) -> Any:
        """Raises RequestError, for a stream of requests when the one that is none comes."""
        if isinstance(request, AsyncIterable):
            return self._all_checked(request)
        if isinstance(request, _Malformed):
            self._failures.add("validation")
            logger.error("a call failed with %s: %s", Code.INVALID_ARGUMENT.name, UNREADABLE)
            raise RequestError(UNREADABLE)
        return request

    async def _all_checked(self, requests: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield self._checked(request)


async def _refuse_unknown(requests: AsyncIterable[Any], context: Context) -> None:
    """End a call of a method that is none: at once, and without a text, as TGIS's server does."""
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return read


def _passing_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """An answer that is bytes has been serialized already, where it held up nobody."""

    def write(response: Any) -> bytes:
        return response if isinstance(response, bytes) else serialize(response)

    return write


async def _abort(context: Context, error: Exception) -> None:
    """Ends the call with the error's status; an error that is not ours is logged, and only its id is told."""
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    if isinstance(error, RouterError):
        code, text = STATUS[error.code], str(error)
        more = retry_later(code.value[0], text) if isinstance(error, OverloadedError) else ()
        await context.abort(code, text, more)
    request_id = secrets.token_hex(8)
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, internal_error(request_id))
