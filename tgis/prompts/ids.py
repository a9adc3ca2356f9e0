"""Resolves ids to real directories, and names to real files, inside a root directory.

Clients receive "not found" for path traversal and permission errors."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tgis.config.adapter_ids import is_adapter_id
from tgis.prompts.errors import AdapterNotFoundError

logger = logging.getLogger(__name__)

_UNFINISHED = (".swp", ".swo", ".tmp", ".part", ".partial", ".incomplete", ".lock")
# Errors of files that do not exist or may not be accessed. Other errors are faults of the disk.
_ABSENT = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ESTALE)
)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class AdapterDirectory:
    """Real directory, and the real root directory that its files must be in; None: no root."""

    directory: Path
    root: Path | None


def find_directory(root: Path, id: str) -> AdapterDirectory:
    """Return the directory of `id`. Links must stay in `root`. Raises AdapterNotFoundError and OSError."""
    if not _is_id(id):
        raise AdapterNotFoundError
    with missing_as_not_found():
        real_root = Path(os.path.realpath(root, strict=True))
        return AdapterDirectory(find_inside(real_root, real_root / id), real_root)


def find_inside(real_root: Path, path: Path) -> Path:
    """Return the real path. Raises AdapterNotFoundError if it is not below `real_root`, and OSError."""
    real = Path(os.path.realpath(path, strict=True))
    if not real.is_relative_to(real_root):
        raise AdapterNotFoundError
    return real


def has_entry(root: Path, id: str) -> bool:
    """Return whether `root` has an entry for `id`, even an unreadable one or a broken link."""
    if not _is_id(id):
        return False
    try:
        os.lstat(root / id)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def is_unfinished(name: str) -> bool:
    """Return whether programs use such a name for files that they are still writing."""
    return name.endswith(_UNFINISHED)


@contextmanager
def missing_as_not_found() -> Iterator[None]:
    """Convert errors for missing and unreadable files to AdapterNotFoundError, and log unreadable files."""
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            logger.warning("%s cannot be read: %s", error.filename, error.strerror)
        if error.errno in _ABSENT:
            raise AdapterNotFoundError from error
        raise


def _is_id(text: str) -> bool:
    return is_adapter_id(text) and not any(part.endswith(".swp") for part in text.split("/"))
