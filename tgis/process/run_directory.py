"""A directory for the sockets and files of one run, this user's alone. What runs before left behind, when
they were killed, is removed with the next one."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from tgis.errors import OperatorError

PREFIX = "text-generation-"
LOCK = "lock"
MIN_AGE_S = 60.0  # younger ones may not have been locked yet


class RunDirectoryError(OperatorError):
    """There is nowhere to put the run's files; the text is one line."""


class RunDirectory:
    """There until `remove`, and held for as long as this process lives."""

    def __init__(self, parent: Path | None = None) -> None:
        """In the system's place for such files, if no other is named. Raises RunDirectoryError."""
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise RunDirectoryError(f"no directory for temporary files: {error.strerror}") from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _remove_abandoned(self.path.parent)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another's, or gone meanwhile
            found = path.lstat()
            is_ours, age_s = found.st_uid == os.getuid(), time.time() - found.st_mtime
            if is_ours and age_s > MIN_AGE_S and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Raises OSError where somebody holds it, or it is no such directory."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
