"""From ids to real directories, and from names to real files, never outside of a root; what is forbidden
cannot be told from what is missing."""

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
# No part begins with a dot: those are ways up, what Kubernetes swaps, and what others hide or are writing.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_ID = re.compile(rf"{_PART}(/+{_PART})*/*")
_UNFINISHED = (".swp", ".swo", ".tmp", ".part", ".partial", ".incomplete", ".lock")
# What the system says of files that are not there, or that one may not reach. Other errors are the disk's.
_ABSENT = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ESTALE)
)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Place:
    """A real directory, and the real one above it that its files must not leave; None where they may."""

    directory: Path
    root: Path | None


def find_place(root: Path, id: str) -> Place:
    """What `id` names below `root`, by itself or by links that stay there. Raises AbsentError, OSError."""
    if not _is_id(id):
        raise AbsentError
    with absence():
        real_root = Path(os.path.realpath(root, strict=True))
        return Place(find_inside(real_root, real_root / id), real_root)


def find_inside(real_root: Path, path: Path) -> Path:
    """The real path of `path`. Raises AbsentError where that is not below `real_root`, OSError."""
    real = Path(os.path.realpath(path, strict=True))
    if not real.is_relative_to(real_root):
        raise AbsentError
    return real


def is_named(root: Path, id: str) -> bool:
    """Whether something below `root` has that name, be it forbidden or a link that leads nowhere."""
    if not _is_id(id):
        return False
    try:
        os.lstat(root / id)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def is_unfinished(name: str) -> bool:
    """Whether programs call so what they are still writing."""
    return name.endswith(_UNFINISHED)


@contextmanager
def absence() -> Iterator[None]:
    """AbsentError instead of the system's errors that mean it; the log tells what is there but forbidden."""
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
