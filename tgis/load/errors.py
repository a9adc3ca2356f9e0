"""Defines the errors of measurements."""

from tgis.errors import OperatorError


class LoadError(OperatorError):
    """Error in the settings of a measurement, in one of its files, or in a load process."""


class AnswerError(Exception):
    """Failure of one request; `kind` is what the report counts."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
