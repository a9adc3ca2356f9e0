"""Defines the errors of requests and of the router. The APIs map the code of an error to their own statuses.

RouterError
├── RequestError        INVALID_ARGUMENT    the request is invalid; the text is part of the API
│   ├── InputTooLongError                   the same; the input leaves too little room for output
│   └── NotFoundError                       the same; the request names an adapter that does not exist
├── PayloadTooLargeError INVALID_ARGUMENT   the request has too many bytes
├── OverloadedError     RESOURCE_EXHAUSTED  no capacity now; the client may retry
│   ├── QueueTimeoutError                   the same; the request waited too long for its first step
│   └── TenantLimitError                    the same; the tenant has used its share of a minute
├── SlowClientError     RESOURCE_EXHAUSTED  the client does not read its answer
├── TimedOutError       DEADLINE_EXCEEDED   no token arrived within the operator's time limit
├── UnavailableError    UNAVAILABLE         shutting down, or the shards were lost for too long
└── GenerationError     per error           an accepted request could not be served

RouterError and the errors of HTTP are ReportedErrors: logs show their `log_text`. StartupError is an
OperatorError and never reaches a client.
"""

from enum import Enum, auto

from tgis.errors import OperatorError

OVERLOADED = "Model is overloaded"


class Code(Enum):
    """Kind of an error. Each protocol has one table from codes to statuses."""

    INVALID_ARGUMENT = auto()
    RESOURCE_EXHAUSTED = auto()
    DEADLINE_EXCEEDED = auto()
    UNAVAILABLE = auto()
    INTERNAL = auto()


def internal_error(request_id: str) -> str:
    """Return the text that a client receives for an unforeseen error."""
    return f"Request failed during generation: internal error, request {request_id}"


class ReportedError(Exception):
    """Base class of errors whose text a client receives. Logs show `log_text`, and never the text itself."""

    is_logged = False
    """True once the error has been logged."""

    def __init__(self, text: str, log_text: str | None = None) -> None:
        """Create an error. An error that may quote the request must have a `log_text`, which quotes only
        numbers, and names of fields and adapters. None: the text quotes nothing else."""
        super().__init__(text)
        self.log_text = text if log_text is None else log_text


class RouterError(ReportedError):
    """Base class of the router's errors. Clients see the text, so it has no prompts, causes or paths."""

    code = Code.INTERNAL


class RequestError(RouterError):
    code = Code.INVALID_ARGUMENT

    def __init__(self, text: str, parameter: str = "", log_text: str | None = None) -> None:
        super().__init__(text, log_text)
        self.parameter = parameter
        """Name of the invalid parameter in Parameters, or empty. An API may have another name for it."""


class InputTooLongError(RequestError):
    """Request error for an input that leaves too little room for output."""

    def __init__(self, text: str, num_inputs: int, parameter: str = "text") -> None:
        super().__init__(text, parameter)
        self.num_inputs = num_inputs
        """Number of input tokens, or a lower bound of it."""


class NotFoundError(RequestError):
    """Request error for an adapter that does not exist."""


class PayloadTooLargeError(RouterError):
    code = Code.INVALID_ARGUMENT

    def __init__(self, maximum: int) -> None:
        super().__init__(f"the request has more than {maximum} bytes")


class OverloadedError(RouterError):
    code = Code.RESOURCE_EXHAUSTED
    retry_s = 1
    """Seconds after which the client may retry."""


class TenantLimitError(OverloadedError):
    def __init__(self, text: str, retry_s: int) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class QueueTimeoutError(OverloadedError):
    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request waited {limit_s:g} s and was not started")


class SlowClientError(RouterError):
    code = Code.RESOURCE_EXHAUSTED

    def __init__(self) -> None:
        super().__init__("the client does not read its answer")


class TimedOutError(RouterError):
    code = Code.DEADLINE_EXCEEDED

    def __init__(self, limit_s: float, is_first: bool) -> None:
        super().__init__(f"no token came within {limit_s:g} s")
        self.limit_s = limit_s
        self.is_first = is_first
        """The time limit, and whether it is the first token's."""


class UnavailableError(RouterError):
    code = Code.UNAVAILABLE


class GenerationError(RouterError):
    def __init__(self, text: str, code: Code = Code.INTERNAL) -> None:
        super().__init__(text)
        self.code = code


class StartupError(OperatorError):
    """Failure to start the router. The operator sees the text as one line."""
