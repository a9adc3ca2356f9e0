"""Defines the exceptions of this package, and explains failures where gRPC's own text does not."""

import re

import grpc

_TOO_LARGE = re.compile(
    r"(?P<side>CLIENT: |SERVER: )?(Received|Sent) message larger than max \((?P<size>\d+) vs\. (?P<max>\d+)\)"
)
_REFUSED = "Connection refused"
_LOST = "the connection was lost: the service ended, one side has no TLS, or the client needs a certificate"
_HINTS = (
    (
        "metadata size exceeds",
        "the call's metadata are too large: cache_salt, logit_bias, stop_token_ids, metadata or the token",
    ),
    ("http1.x server", "the target is an HTTP port, and this client needs the service's gRPC port"),
    ("CERTIFICATE_VERIFY_FAILED", "the service's certificate is not from a CA that the client trusts"),
    ("Hostname Verification", "the service's certificate is for another host name"),
    ("WRONG_VERSION_NUMBER", "the client uses TLS, and the service does not"),
    ("Socket closed", _LOST),
    ("Connection reset", _LOST),  # by a process that ended with data to read
    ("Broken pipe", _LOST),
    (_REFUSED, "nothing listens at the target"),
)
"""Parts of gRPC's texts, and what they mean."""


class ClientError(Exception):
    """Base class of this package's errors."""


class SettingsError(ClientError, ValueError):
    """Error in parameters or settings, found before anything is sent."""


class CallError(ClientError):
    """Error of a call: the service refused it, failed, or could not be reached."""

    def __init__(
        self, code: grpc.StatusCode, details: str, retry_after_s: float | None, num_attempts: int
    ) -> None:
        super().__init__(f"{code.name}: {_explain(details)}")
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

    @property
    def is_refused(self) -> bool:
        """True if nothing listens at the target."""
        return _REFUSED in self.details


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
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _is_too_large(details):
        kind = TooLargeError
    return kind(code, details, retry_after_s, num_attempts)


def _is_too_large(details: str) -> bool:
    """Return True if a call has more bytes than the service ever takes."""
    large = _TOO_LARGE.search(details)
    return "metadata size exceeds" in details or (large is not None and large["side"] != "CLIENT: ")


def _explain(details: str) -> str:
    """Return a failure's text for people."""
    if large := _TOO_LARGE.search(details):
        if large["side"] == "CLIENT: ":
            return f"the answer has {large['size']} bytes, more than the channel's limit of {large['max']}"
        return f"the request has {large['size']} bytes, more than the service's limit of {large['max']}"
    hint = next((hint for part, hint in _HINTS if part in details), "")
    return f"{hint} ({details})" if hint else details or "no details"
