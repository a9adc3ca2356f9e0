"""Writes files in a temporary directory and then moves them, so that no conversion leaves partial files."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgis.errors import OperatorError


class ConversionError(OperatorError):
    """Error when a file cannot be converted; the text is one line that names it."""


@contextmanager
def workshop(directory: Path) -> Iterator[Path]:
    """Yield a private directory inside `directory`, removed after the block. Raises ConversionError."""
    try:
        room = tempfile.TemporaryDirectory(prefix=".convert-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConversionError(f"{directory} cannot be written to: {error.strerror}") from error
    with room as path:
        yield Path(path)


def deliver(path: Path, directory: Path, like: Path) -> None:
    """Move a finished file into `directory` atomically, with the permissions of the file `like`."""
    path.chmod(like.stat().st_mode & 0o777)
    os.replace(path, directory / path.name)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without the advice that libraries add below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
