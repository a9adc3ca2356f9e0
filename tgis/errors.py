"""Defines the base class of errors that end a command with one line for the operator and no traceback, and
what such a line quotes of other errors."""


class OperatorError(Exception):
    """Error in the configuration, the model or the machine; its text is the line for the operator."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without the advice that libraries add below. If there is no
    text, return the name of the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
