"""Where files are written before they take their places: a conversion that is interrupted leaves nothing
half-written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgis.errors import OperatorError


class ConversionError(OperatorError):
    """A file cannot be converted; the text is one line that names it."""


@contextmanager
def workshop(directory: Path) -> Iterator[Path]:
    """A private directory inside `directory`, gone at the end. Raises ConversionError."""
    try:
        room = tempfile.TemporaryDirectory(prefix=".convert-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConversionError(f"{directory} cannot be written to: {error.strerror}") from error
    with room as path:
        yield Path(path)


def deliver(path: Path, directory: Path, like: Path) -> None:
    """Moves a finished file into `directory`, in one step and with the permissions of the file `like`."""
    path.chmod(like.stat().st_mode & 0o777)
    os.replace(path, directory / path.name)


def first_line(error: Exception) -> str:
    """What an error says, without the advice that libraries add below."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
