"""The failures that end a command: their text is the one line an operator needs, without a traceback."""


class OperatorError(Exception):
    """Something about the configuration, the model or the machine is not as it must be."""
