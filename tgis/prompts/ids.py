"""Resolves ids to real directories, and names to real files, that never leave a root directory.

Path traversal and permission errors read like "not found" to the client."""

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tgis.prompts.errors import AbsentError

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 256
# No part begins with a dot: such names are parent directories, the links that Kubernetes swaps, or files
# that other programs hide or are still writing.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_ID = re.compile(rf"{_PART}(/+{_PART})*/*")
_UNFINISHED = (".swp", ".swo", ".tmp", ".part", ".partial", ".incomplete", ".lock")
# Errors of files that do not exist or may not be accessed. Other errors are faults of the disk.
_ABSENT = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ESTALE)
)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Place:
    """Real directory, and the real root that its files must not leave (None: they may be anywhere)."""

    directory: Path
    root: Path | None


def find_place(root: Path, id: str) -> Place:
    """Find the directory of `id` below `root`. Symbolic links are followed if they stay below `root`.

    Raises AbsentError and OSError."""
    if not _is_id(id):
        raise AbsentError
    with absence():
        real_root = Path(os.path.realpath(root, strict=True))
        return Place(find_inside(real_root, real_root / id), real_root)


def find_inside(real_root: Path, path: Path) -> Path:
    """Return the real path of `path`. Raises AbsentError if that is not below `real_root`, and OSError."""
    real = Path(os.path.realpath(path, strict=True))
    if not real.is_relative_to(real_root):
        raise AbsentError
    return real


def is_named(root: Path, id: str) -> bool:
    """Return whether `root` has an entry of that name, even a forbidden one or a broken link."""
    if not _is_id(id):
        return False
    try:
        os.lstat(root / id)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def is_unfinished(name: str) -> bool:
    """Return whether the name is one that programs use for files they are still writing."""
    return name.endswith(_UNFINISHED)


@contextmanager
def absence() -> Iterator[None]:
    """Turn errors of missing and forbidden files into AbsentError. Log the forbidden ones."""
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            logger.warning("%s cannot be read: %s", error.filename, error.strerror)
        if error.errno in _ABSENT:
            raise AbsentError from error
        raise


def _is_id(text: str) -> bool:
    is_swap_file = any(part.endswith(".swp") for part in text.split("/"))
    return len(text) <= MAX_ID_BYTES and _ID.fullmatch(text) is not None and not is_swap_file
