"""The failures that end a command: their text is the one line an operator needs, and no traceback belongs to it."""


class OperatorError(Exception):
    """Something about the configuration, the model or the machine is not as it must be."""
