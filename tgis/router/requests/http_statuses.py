"""HTTP statuses of errors, one table for each door, which its answers and spans share."""

from collections.abc import Callable, Mapping

from tgis.router.errors import (
    Code,
    GenerationError,
    NotFoundError,
    PayloadTooLargeError,
    RouterError,
    TimedOutError,
)
from tgis.router.requests.doors import LMI, OPENAI, TGI, Door

NOT_FOUND, TOO_LARGE, FAILED = NotFoundError, PayloadTooLargeError, GenerationError
"""Errors that have a status of their own in some door."""


def is_late(error: Exception) -> bool:
    """Return True if a text has begun whose next token did not come in time."""
    return isinstance(error, TimedOutError) and not error.is_first


Kind = Code | type[RouterError] | Callable[[Exception], bool]
STATUSES: Mapping[str, Mapping[Kind, int]] = {
    OPENAI.name: {
        NOT_FOUND: 404,
        TOO_LARGE: 413,
        Code.INVALID_ARGUMENT: 400,
        Code.RESOURCE_EXHAUSTED: 429,
        Code.UNAVAILABLE: 503,
        Code.DEADLINE_EXCEEDED: 504,
        Code.INTERNAL: 500,
    },
    TGI.name: {
        NOT_FOUND: 404,
        TOO_LARGE: 413,
        FAILED: 424,
        Code.INVALID_ARGUMENT: 422,
        Code.RESOURCE_EXHAUSTED: 429,
        Code.UNAVAILABLE: 503,
        Code.DEADLINE_EXCEEDED: 424,
        Code.INTERNAL: 424,
    },
    LMI.name: {
        TOO_LARGE: 413,
        FAILED: 424,
        is_late: 424,
        Code.INVALID_ARGUMENT: 424,
        Code.RESOURCE_EXHAUSTED: 503,
        Code.UNAVAILABLE: 503,
        Code.DEADLINE_EXCEEDED: 400,
        Code.INTERNAL: 424,
    },
}


def http_status(error: Exception, door: Door) -> int:
    """Return the status of an answer that has not begun. An unforeseen error is the service's fault."""
    statuses = STATUSES[door.name]
    own = next((status for kind, status in statuses.items() if _is_kind(error, kind)), None)
    if own is not None:
        return own
    return statuses[error.code if isinstance(error, RouterError) else Code.INTERNAL]


def _is_kind(error: Exception, kind: Kind) -> bool:
    if isinstance(kind, Code):
        return False
    return isinstance(error, kind) if isinstance(kind, type) else kind(error)
