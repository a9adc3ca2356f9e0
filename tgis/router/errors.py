"""Everything that can go wrong with a request or the router, each with the code that a door turns into its
status.

RouterError
├── RequestError        INVALID_ARGUMENT    the request is wrong; the text is the contract's
│   └── QuotingError                        and may quote the request, which no log may
├── OverloadedError     RESOURCE_EXHAUSTED  no room now, try again
├── SlowReaderError     RESOURCE_EXHAUSTED  the client does not read its answer
├── UnavailableError    UNAVAILABLE         shutting down, or the shards stayed away too long
└── GenerationError     its own             an accepted request could not be served

StartupError, an OperatorError, never reaches a client.
"""

from enum import Enum, auto

from tgis.errors import OperatorError

OVERLOADED = "Model is overloaded"


class Code(Enum):
    """What kind of answer an error is; each door has one table from here to its own statuses."""

    INVALID_ARGUMENT = auto()
    RESOURCE_EXHAUSTED = auto()
    UNAVAILABLE = auto()
    INTERNAL = auto()


def internal_error(request_id: str) -> str:
    """All that a client is told of what nobody foresaw."""
    return f"Request failed during generation: internal error, request {request_id}"


class RouterError(Exception):
    """The text is shown to clients: no prompt, no cause, no path in it."""

    code = Code.INTERNAL

    @property
    def log_text(self) -> str:
        """What may be logged of the text."""
        return str(self)


class RequestError(RouterError):
    code = Code.INVALID_ARGUMENT


class QuotingError(RequestError):
    """What follows the first colon may quote the request: its client alone is told."""

    @property
    def log_text(self) -> str:
        return str(self).partition(":")[0]


class OverloadedError(RouterError):
    code = Code.RESOURCE_EXHAUSTED


class SlowReaderError(RouterError):
    code = Code.RESOURCE_EXHAUSTED

    def __init__(self) -> None:
        super().__init__("the client does not read its answer")


class UnavailableError(RouterError):
    code = Code.UNAVAILABLE


class GenerationError(RouterError):
    def __init__(self, text: str, code: Code = Code.INTERNAL) -> None:
        super().__init__(text)
        self.code = code


class StartupError(OperatorError):
    """The router cannot start; the text is the one line an operator reads."""
