"""Directory of compiled code: beside the source if that is this user's, else in the user's cache directory,
else in the run's own directory, where restarted shards find it, else none. Code beside the source is read in
any case."""

import ast
import errno
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 << 20  # space in the run's directory that is left for more important files
_PACKAGE = __name__.split(".")[0]
_BESIDE_SOURCE = Path(__file__).parent / "__pycache__"


_NAME = "tgis"  # of the directory in that of the user's caches


def user_directories() -> list[Path]:
    """Return the directory for code of this user; none if there is no place for it."""
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
    """Keep the user's code in this directory of caches. A relative path has no effect, as XDG's specification
    demands."""
    if home is None or not os.path.isabs(home):
        return
    own = [Path(home) / _NAME]
    first = _bases.index(_BESIDE_SOURCE) + 1
    _bases[first : first + len(_user_directories)] = own
    _user_directories[:] = own


def keep_beside_source() -> None:
    """Keep code beside the source only, whoever owns it."""
    _bases[:] = [_BESIDE_SOURCE]
    can_be_written.cache_clear()
    if _BESIDE_SOURCE.exists():
        _owners.add(_BESIDE_SOURCE.stat().st_uid)


def add_run_directory(directory: Path) -> None:
    """Let code be kept in `directory` if no other directory is writable. Only this user may have access to
    its parent, because the code kept there is executed."""
    if has_room(directory) and directory not in _bases:
        _bases.append(directory)
        _run_directories.add(directory)


def has_room(directory: Path) -> bool:
    """Return True if code in `directory` leaves enough space for more important files."""
    try:
        found = shutil.disk_usage(directory.parent).free >= MIN_FREE_BYTES
    except OSError:
        found = False
    if not found:
        logger.info("%s has no room for compiled code", directory.parent)
    return found


def cache_directory(function: Callable[[Any], None]) -> Path | None:
    """Return the directory for a kernel's compiled code, None if nothing is writable. Its name is a hash of
    all source files that the kernel may call, because numba checks only one file."""
    sources = (Path(file).read_bytes() for file in sorted(_sources(function.__code__.co_filename)))
    name = f"kernels-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"
    base = next(filter(can_be_written, _bases), None)
    if base is None:
        return None
    if base != _BESIDE_SOURCE:
        _copy(_BESIDE_SOURCE / name, base / name)
    return base / name


def describe_lifetime(directory: Path | None) -> str:
    """Describe for log lines how long code in a `cache_directory` is kept."""
    if directory is None:
        return "cannot be kept, so that every start compiles"
    if directory.parent in _run_directories:
        return "is kept for this run, so that the next one compiles again"
    return f"is kept in {directory.parent}, where later starts find it"


def packaged_files() -> list[Path]:
    """Return the files of compiled code beside the source, one for each kernel."""
    return sorted(_BESIDE_SOURCE.glob("kernels-*/**/*.nbc"))


_owners = {os.geteuid()}


@functools.cache
def can_be_written(base: Path) -> bool:
    """Return True if this user owns the directory and can write to it."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        found = base.stat()
        if found.st_uid not in _owners:
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if found.st_mode & stat.S_IWOTH:  # what is kept is executed
            raise PermissionError(errno.EPERM, "everybody may write there")
        with tempfile.TemporaryFile(dir=base):
            return True
    except OSError as error:
        logger.info("compiled code cannot be kept in %s: %s", base, error.strerror)
        return False


def _copy(packaged: Path, kept: Path) -> None:
    """Copy packaged code to a writable directory, because numba reads none where it cannot write. Several
    ranks may copy at once; the first one's copy is used."""
    if kept.exists() or not packaged.is_dir():
        return
    try:
        with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as unfinished:
            os.rename(_copy_writable(packaged, Path(unfinished) / "copy"), kept)
    except OSError as error:
        if not kept.exists():
            logger.info("%s was not copied to %s: %s", packaged, kept, error)


def _copy_writable(source: Path, target: Path) -> Path:
    """Copy a directory, which may be read-only, to one that can be renamed and written to."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    return target


@functools.cache
def _sources(file: str) -> frozenset[str]:
    """Return the file and all files of this package that it imports, directly or indirectly."""
    found = {file}
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == _PACKAGE:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                found |= _sources_of_module(name)
    return frozenset(found)


def _sources_of_module(name: str) -> frozenset[str]:
    """Return `_sources` of a module; none if `name` is something else in a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return frozenset()
    return _sources(spec.origin) if spec and spec.origin else frozenset()
