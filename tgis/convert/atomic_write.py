"""Writes files to a temporary directory and then moves them, so that no conversion leaves partial files."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tgis.errors import OperatorError


class ConversionError(OperatorError):
    """Error for a file that cannot be converted; its text is one line that names the file."""


@contextmanager
def staging_directory(directory: Path) -> Iterator[Path]:
    """Yield a private directory in `directory`, which is removed after the block. Raises ConversionError."""
    try:
        staged = tempfile.TemporaryDirectory(prefix=".convert-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConversionError(f"{directory} cannot be written to: {error.strerror}") from error
    with staged as path:
        yield Path(path)


def move_files(files: Sequence[Path], directory: Path, like: Sequence[Path]) -> None:
    """Move finished files to `directory` in order, each with the permissions of its counterpart in `like`.

    Each move is atomic. After an error or a signal, new files are removed again, because readers would
    mistake some of the files for all of them. Raises ConversionError."""
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
