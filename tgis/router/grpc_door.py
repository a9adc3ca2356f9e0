"""What stands before every method of the public gRPC service: bytes that are no message are refused, errors
become statuses by one table, and nothing unforeseen tells a client more than a request id."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tgis.router.errors import Code, RequestError, RouterError, internal_error
from tgis.router.series import Counter

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


class _Malformed:
    """Stands for a request whose bytes could not be read."""


class Door(grpc.aio.ServerInterceptor):
    """Wraps the methods under `prefix`; others (health, reflection) pass as they are."""

    def __init__(self, prefix: str, failures: Counter) -> None:
        """`failures` counts what no method gets to see."""
        self._prefix, self._failures = prefix, failures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        make, method = (
            (grpc.unary_stream_rpc_method_handler, _guard_stream(handler.unary_stream, self._checked))
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, _guard_unary(handler.unary_unary, self._checked))
        )
        reader = _tolerant(handler.request_deserializer)
        return make(method, request_deserializer=reader, response_serializer=handler.response_serializer)

    def _checked(self, request: Any) -> Any:
        if isinstance(request, _Malformed):
            self._failures.add("validation")
            logger.error("a call failed with %s: %s", Code.INVALID_ARGUMENT.name, UNREADABLE)
            raise RequestError(UNREADABLE)
        return request


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return read


def _guard_unary(
    method: Callable[[Any, Context], Awaitable[Any]], checked: Callable[[Any], Any]
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await method(checked(request), context)
        except Exception as error:
            await _abort(context, error)

    return call


def _guard_stream(
    method: Callable[[Any, Context], AsyncGenerator[Any, None]], checked: Callable[[Any], Any]
) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(request: Any, context: Context) -> None:
        try:
            async with aclosing(method(checked(request), context)) as responses:
                async for response in responses:
                    await context.write(response)
        except Exception as error:
            await _abort(context, error)

    return call


async def _abort(context: Context, error: Exception) -> None:
    """Ends the call with the error's status; an error that is not ours is logged, and only its id is told."""
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    if isinstance(error, RouterError):
        await context.abort(STATUS[error.code], str(error))
    request_id = secrets.token_hex(8)
    logger.error("request %s failed", request_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, internal_error(request_id))
