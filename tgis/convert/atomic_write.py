"""Writes files in a temporary directory and then moves them, so that no conversion leaves partial files."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tgis.errors import OperatorError


class ConversionError(OperatorError):
    """Error when a file cannot be converted; the text is one line that names it."""


@contextmanager
def staging_directory(directory: Path) -> Iterator[Path]:
    """Yield a private directory inside `directory`, removed after the block. Raises ConversionError."""
    try:
        staged = tempfile.TemporaryDirectory(prefix=".convert-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConversionError(f"{directory} cannot be written to: {error.strerror}") from error
    with staged as path:
        yield Path(path)


def move_files(files: Sequence[Path], directory: Path, like: Sequence[Path]) -> None:
    """Move finished files into `directory` in order, each with the permissions of its counterpart in `like`.

    Each move is atomic. After an error or a signal, files that were not there before are removed again,
    because readers would take some of them for all. Raises ConversionError."""
    try:
        with ExitStack() as undo:
            for file, original in zip(files, like, strict=True):
                target = directory / file.name
                if not target.exists():
                    undo.callback(target.unlink, missing_ok=True)
                file.chmod(original.stat().st_mode & 0o777)
                os.replace(file, target)
            undo.pop_all()
    except OSError as error:
        raise ConversionError(f"{directory} cannot be written to: {error.strerror}") from error
