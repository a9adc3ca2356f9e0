"""Defines the base class of errors that end a command with one line for the operator and no traceback, and
what such a line quotes of other errors."""


class OperatorError(Exception):
    """Error in the configuration, the model or the machine; its text is the line for the operator."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
