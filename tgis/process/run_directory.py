"""Creates a private directory for the files of a run, and removes directories that killed runs have left."""

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
HTTP_URL = "http-url"  # file in the directory of a service, with the URL of its HTTP port
MIN_AGE_S = 60.0  # a younger directory may not be locked yet


class RunDirectoryError(OperatorError):
    """Error if no run directory can be created; its text is one line."""


class RunDirectory:
    """Directory that exists until `remove`, with a lock that is held while this process lives."""

    def __init__(self, parent: Path | None = None) -> None:
        """Create and lock the directory in `parent`, by default the system's temporary directory.

        Raises RunDirectoryError."""
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


def running_urls(parent: Path | None = None) -> list[str]:
    """Return the URLs of the HTTP ports of this user's services on this machine, sorted."""
    urls = set()
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*/{HTTP_URL}"):
        with contextlib.suppress(OSError, ValueError):  # the service may end at this moment
            if path.parent.lstat().st_uid == os.getuid() and not _is_unlocked(path.parent):
                urls.add(path.read_text().strip())
    return sorted(filter(None, urls))


def _is_unlocked(path: Path) -> bool:
    """Return True if no process holds the lock. Raises OSError if `path` is not a run directory."""
    try:
        return _is_abandoned(path)
    except BlockingIOError:
        return False


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process uses or has removed it
            status = path.lstat()
            is_ours = status.st_uid == os.getuid()
            age_s = time.time() - status.st_mtime
            if is_ours and age_s > MIN_AGE_S and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Return True if no process holds the lock.

    Raises BlockingIOError if one does, and another OSError if `path` is not a run directory."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
