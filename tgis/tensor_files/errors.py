"""Errors of tensor files."""

from tgis.errors import OperatorError

DAMAGED = "cannot be read: it is truncated or damaged"
INCOMPLETE = "the checkpoint is truncated or damaged"


class TensorFileError(OperatorError):
    """Error for a file that cannot be used; its text is one line that begins with the file's path."""
