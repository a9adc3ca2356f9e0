"""Defines the base class of errors that end a command with one line for the operator and no traceback."""


class OperatorError(Exception):
    """Error in the configuration, the model or the machine; its text is the line for the operator."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without libraries' advice below it; else its type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
