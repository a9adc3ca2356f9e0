"""Decides whether and when a failed call is sent again. It does no I/O."""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tgis_client.errors import CallError, call_error
from tgis_client.pb import client_pb2 as pb

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
JITTER = 0.2
RETRY_INFO = "google.rpc.RetryInfo"


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of the retries of a call.

    A call is sent again after a status in `codes`, with growing delays, and after RESOURCE_EXHAUSTED if the
    service says when to come again. No call is sent again after its first token, or past its timeout."""

    max_attempts: int = 4
    """Maximum number of times that a call is sent, with the first."""
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    backoff_multiplier: float = 2.0
    codes: frozenset[grpc.StatusCode] = frozenset({UNAVAILABLE})
    max_server_delay_s: float = 60.0
    """Maximum delay that the service may ask for; a call that must wait longer fails."""

    def backoff_s(self, num_attempts: int) -> float:
        """Return the delay after the given number of failed attempts, varied at random."""
        # A larger exponent would exceed the range of floats.
        grown = self.initial_backoff_s * self.backoff_multiplier ** min(num_attempts - 1, 64)
        return min(grown, self.max_backoff_s) * random.uniform(1 - JITTER, 1 + JITTER)


NO_RETRIES = RetryPolicy(max_attempts=1)


@dataclass(frozen=True)
class Failure:
    """End of a call that failed."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


def read_failure(error: Any) -> Failure:
    """Return the failure of a grpc.RpcError of either of grpc's APIs."""
    metadata = (*_pairs(error.initial_metadata()), *_pairs(error.trailing_metadata()))
    return Failure(error.code(), error.details() or "", metadata)


def _pairs(metadata: Iterable[Any] | None) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in metadata or ())


@dataclass(frozen=True)
class ServerDelay:
    """Wish of the service for another attempt."""

    delay_s: float | None = None
    """Delay before it; None: not said."""
    is_refused: bool = False
    """True if the service wants no other attempt."""


def read_server_delay(failure: Failure) -> ServerDelay:
    """Read gRPC's pushback, else google.rpc.RetryInfo, else the header `retry-after` of a proxy."""
    metadata = dict(failure.metadata)
    if isinstance(pushback := metadata.get("grpc-retry-pushback-ms"), str):
        # As gRPC specifies: a negative or unreadable number asks for no other attempt.
        is_delay = pushback.isascii() and pushback.isdecimal()
        return ServerDelay(int(pushback) / 1000) if is_delay else ServerDelay(is_refused=True)
    if isinstance(status := metadata.get("grpc-status-details-bin"), bytes):
        delay_s = _retry_info_s(status)
        if delay_s is not None:
            return ServerDelay(delay_s)
    header = metadata.get("retry-after")
    return ServerDelay(_retry_after_s(header) if isinstance(header, str) else None)


def _retry_info_s(status: bytes) -> float | None:
    try:
        for detail in pb.StatusDetails.FromString(status).details:
            if detail.type_url.endswith(f"/{RETRY_INFO}"):
                delay = pb.RetryInfo.FromString(detail.value).retry_delay
                return max(0.0, delay.seconds + delay.nanos / 1e9)
    except DecodeError:
        pass
    return None


def _retry_after_s(header: str) -> float | None:
    """Read seconds or a date."""
    if header.isascii() and header.isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


class Attempts:
    """Attempts of one call: counts them, and holds the deadline of them all."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._num_attempts = 0

    @property
    def is_last(self) -> bool:
        """Return True if no attempt can follow the one that was counted last."""
        return self._num_attempts >= self._policy.max_attempts

    def begin(self) -> float | None:
        """Count another attempt, and return its timeout."""
        self._num_attempts += 1
        return self._remaining_s()

    def delay_after(self, failure: Failure, has_begun: bool = False) -> float:
        """Return the seconds until the next attempt. Raises CallError if there is none.

        `has_begun` is True if the caller already has a part of the answer."""
        server = read_server_delay(failure)
        error = call_error(failure.code, failure.details, server.delay_s, self._num_attempts)
        if has_begun or server.is_refused or self.is_last:
            raise error
        delay_s = self._delay_s(failure.code, server.delay_s, error)
        remaining_s = self._remaining_s()
        if remaining_s is not None and delay_s >= remaining_s:
            raise error
        return delay_s

    def _delay_s(self, code: grpc.StatusCode, server_delay_s: float | None, error: CallError) -> float:
        policy = self._policy
        if server_delay_s is not None and code in policy.codes | {grpc.StatusCode.RESOURCE_EXHAUSTED}:
            if server_delay_s > policy.max_server_delay_s:
                raise error
            # Calls that are told the same delay must not all come at once.
            return server_delay_s + random.uniform(0, JITTER) * server_delay_s
        if code not in policy.codes:
            raise error
        return policy.backoff_s(self._num_attempts)

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
