"""Defines the errors of measurements."""

from tgis.errors import OperatorError


class LoadError(OperatorError):
    """Error in the settings of a measurement, in one of its files, or in a load process."""


class AnswerError(Exception):
    """Failure of one request; `kind` is what the report counts, `message` the service's own text."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.message = message


class CancellationError(Exception):
    """Raised while an answer is received, so that the client cancels the request."""
