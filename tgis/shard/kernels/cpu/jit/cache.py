"""Directory of compiled code: the first writable one of the source's directory (if this user owns it), the
user's cache directory, and the run's directory, which restarted shards share. Code in the source's directory
is always read."""

import errno
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 << 20  # free space that code leaves for more important files
_PACKAGE = __name__.split(".")[0]
_BESIDE_SOURCE = Path(__file__).parent / "__pycache__"


# Imports from this package. Parsing all sources would take a third of a second at each start.
_IMPORTS = re.compile(rf"^from ({_PACKAGE}[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
_NAME = "tgis"  # directory in the user's cache directory


def user_directories() -> list[Path]:
    """Return the user's directory for code, if there is one."""
    return list(_user_directories)


def _usual_directories() -> list[Path]:
    try:
        return [Path.home() / ".cache" / _NAME]
    except RuntimeError:  # HOME is not set and the user has no passwd entry
        return []


_user_directories = _usual_directories()
_bases = [_BESIDE_SOURCE, *_user_directories]
_run_directories: set[Path] = set()


def use_cache_home(home: str | None) -> None:
    """Store the user's code in the cache directory `home`. A relative path has no effect, as the XDG
    specification requires."""
    if home is None or not os.path.isabs(home):
        return
    own = [Path(home) / _NAME]
    first = _bases.index(_BESIDE_SOURCE) + 1
    _bases[first : first + len(_user_directories)] = own
    _user_directories[:] = own


def keep_beside_source() -> None:
    """Store code only in the source's directory, whoever owns it."""
    _bases[:] = [_BESIDE_SOURCE]
    can_be_written.cache_clear()
    if _BESIDE_SOURCE.exists():
        _owners.add(_BESIDE_SOURCE.stat().st_uid)


def add_run_directory(directory: Path) -> None:
    """Store code in `directory` if no other directory is writable. Only this user may have access to its
    parent, because the stored code is executed."""
    if has_room(directory) and directory not in _bases:
        _bases.append(directory)
        _run_directories.add(directory)


def has_room(directory: Path) -> bool:
    """Return True if code in `directory` leaves enough space for more important files."""
    try:
        is_enough = shutil.disk_usage(directory.parent).free >= MIN_FREE_BYTES
    except OSError:
        is_enough = False
    if not is_enough:
        logger.info("%s has too little free space for compiled code", directory.parent)
    return is_enough


def cache_directory(function: Callable[[Any], None]) -> Path | None:
    """Return the directory for a kernel's compiled code, or None if none is writable. Its name is a hash of
    all source files that the kernel may call, because numba checks only one file."""
    name = _directory_name(function.__code__.co_filename)
    base = next(filter(can_be_written, _bases), None)
    if base is None:
        return None
    if base != _BESIDE_SOURCE:
        _copy(_BESIDE_SOURCE / name, base / name)
    return base / name


def describe_lifetime(directory: Path | None) -> str:
    """Return text for log lines: how long code in a `cache_directory` is stored."""
    if directory is None:
        return "cannot be stored, so every start compiles again"
    if directory.parent in _run_directories:
        return "is stored for this run, so the next run compiles again"
    return f"is stored in {directory.parent} for later starts"


def packaged_files() -> list[Path]:
    """Return the files of compiled code in the source's directory, one per kernel."""
    return sorted(_BESIDE_SOURCE.glob("kernels-*/**/*.nbc"))


_owners = {os.geteuid()}


@functools.cache
def can_be_written(base: Path) -> bool:
    """Return True if this user owns the directory and can write to it."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        status = base.stat()
        if status.st_uid not in _owners:
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if status.st_mode & stat.S_IWOTH:  # stored code is executed
            raise PermissionError(errno.EPERM, "other users may write to it")
        with tempfile.TemporaryFile(dir=base):
            return True
    except OSError as error:
        logger.info("compiled code cannot be stored in %s: %s", base, error.strerror)
        return False


def _copy(packaged: Path, stored: Path) -> None:
    """Copy packaged code to a writable directory, because numba reads only from directories to which it can
    write. Several ranks may copy at once; the first copy is used."""
    if stored.exists() or not packaged.is_dir():
        return
    try:
        with tempfile.TemporaryDirectory(dir=stored.parent, ignore_cleanup_errors=True) as unfinished:
            os.rename(_copy_writable(packaged, Path(unfinished) / "copy"), stored)
    except OSError as error:
        if not stored.exists():
            logger.info("%s was not copied to %s: %s", packaged, stored, error)


def _copy_writable(source: Path, target: Path) -> Path:
    """Copy a directory, which may be read-only, and make the copy writable."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    return target


@functools.cache
def _directory_name(file: str) -> str:
    sources = (Path(source).read_bytes() for source in sorted(_sources(file)))
    return f"kernels-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"


@functools.cache
def _sources(file: str) -> frozenset[str]:
    """Return the file and all files of this package that it imports directly or indirectly."""
    files = {file}
    for module, names in _IMPORTS.findall(Path(file).read_text()):
        for name in (module, *(f"{module}.{word}" for word in re.findall(r"\w+", names))):
            files |= _sources_of_module(name)
    return frozenset(files)


def _sources_of_module(name: str) -> frozenset[str]:
    """Return `_sources` of a module, or nothing if `name` is not a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return frozenset()
    return _sources(spec.origin) if spec and spec.origin else frozenset()
