"""Defines the exceptions of this package."""

import grpc

from tgis_client.explanations import explain, is_too_large


class ClientError(Exception):
    """Base class of this package's errors."""


class SettingsError(ClientError, ValueError):
    """Error in parameters or settings, found before anything is sent."""


class CallError(ClientError):
    """Error of a call: the service refused it, failed, or could not be reached."""

    def __init__(
        self, code: grpc.StatusCode, details: str, retry_after_s: float | None, num_attempts: int
    ) -> None:
        super().__init__(f"{code.name}: {explain(details)}")
        self.code = code
        self.details = details
        """Text of the service or of gRPC, without an explanation."""
        self.retry_after_s = retry_after_s
        """Delay that the service asked for before another attempt."""
        self.num_attempts = num_attempts


class InvalidRequestError(CallError):
    """INVALID_ARGUMENT: the service will never accept this request."""


class TooLargeError(InvalidRequestError):
    """RESOURCE_EXHAUSTED: the request has more bytes than the service accepts."""


class OverloadedError(CallError):
    """RESOURCE_EXHAUSTED: a limit of the service or of the tenant was reached."""


class UnavailableError(CallError):
    """UNAVAILABLE: the service is starting, stopping, lost, or not there."""


class DeadlineError(CallError):
    """DEADLINE_EXCEEDED: the call's timeout has passed."""


class UnauthenticatedError(CallError):
    """UNAUTHENTICATED: the service does not accept the token."""


_TYPES: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}


def call_error(
    code: grpc.StatusCode, details: str, retry_after_s: float | None, num_attempts: int
) -> CallError:
    kind = _TYPES.get(code, CallError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and is_too_large(details):
        kind = TooLargeError
    return kind(code, details, retry_after_s, num_attempts)
