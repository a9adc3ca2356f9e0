"""Defines the base class of errors that end a command with one line for the operator and no traceback."""


class OperatorError(Exception):
    """Error in the configuration, the model or the machine; its text is the line for the operator."""
