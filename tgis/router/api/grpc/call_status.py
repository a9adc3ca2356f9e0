"""Ends a call with a status and frees everything that the call holds."""

import asyncio
from typing import Any, NamedTuple

import grpc

from tgis.router.errors import ReportedError

Context = grpc.aio.ServicerContext[Any, Any]


class Status(NamedTuple):
    """A status other than OK."""

    code: grpc.StatusCode
    text: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()


class CallRefusedError(ReportedError):
    """Error of a call that ends with a status for which there is no RouterError."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


async def end_call(context: Context, status: Status) -> None:
    """End the call with `status`. Call this outside of `except`, so that no error is chained to it.
    Only `abort` ends a unary call without sending a message first, and clients do not retry a call after a
    message. grpc.aio keeps the AbortError as long as the call, and raises it again."""
    try:
        await context.abort(*status)
    except grpc.aio.AbortError as error:
        drop_tracebacks(error)
    except grpc.aio.InternalError:  # the client is gone, which gRPC may report only now
        raise asyncio.CancelledError from None


def drop_tracebacks(error: BaseException) -> None:
    """Remove the frames from `error`, its causes, its context and its group.
    Frames hold requests, texts and token ids, and some of asyncio's frames hold the error that refers to
    them. Only the garbage collector would free such a cycle, and it rarely examines old objects."""
    errors = [error]
    seen = {id(error)}
    for each in errors:
        each.__traceback__ = None
        group = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        for other in (each.__cause__, each.__context__, *group):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                errors.append(other)
