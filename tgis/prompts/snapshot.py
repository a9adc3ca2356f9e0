"""Takes consistent snapshots of the files of a soft prompt or an adapter."""

import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tgis.prompts.errors import AdapterNotFoundError, TooLargeError
from tgis.prompts.ids import AdapterDirectory, find_inside, missing_as_not_found

# Two writes within this time may give a file the same timestamp.
CLOCK_NS = 50_000_000
TRIES = 8
CHUNK_BYTES = 1 << 20

Choose = Callable[[Collection[str]], Sequence[str]]


@dataclass(frozen=True)
class FilesState:
    """State of files, to detect changes. `files` has their names, inodes, sizes and times."""

    directory: Path
    files: tuple[tuple[str, tuple[int, ...]], ...]
    changed_ns: int
    is_settled: bool = field(compare=False)
    """True if every later change results in a different state."""


def read_state(directory: Path, choose: Choose) -> FilesState:
    """Return the state of the files that `choose` selects. Raises AdapterNotFoundError and OSError."""
    now_ns = time.time_ns()
    with missing_as_not_found():
        names = choose(os.listdir(directory))
        statuses = {name: os.stat(directory / name) for name in names}
    if not all(stat.S_ISREG(status.st_mode) for status in statuses.values()):
        raise AdapterNotFoundError
    # Programs can set a file's modification time, but not its change time.
    changed_ns = max((status.st_ctime_ns for status in statuses.values()), default=0)
    files = tuple((name, _signature(status)) for name, status in statuses.items())
    return FilesState(directory, files, changed_ns, changed_ns < now_ns - CLOCK_NS)


def copy_files(source: AdapterDirectory, choose: Choose, target: Path, max_bytes: int) -> FilesState:
    """Copy the files to `target` and return their state; the limit of each file is `max_bytes`.

    Raises AdapterNotFoundError, also if the files keep changing, TooLargeError and OSError."""
    for _ in range(TRIES):
        before = _await_rest(source.directory, choose)
        for name, _ in before.files:
            _copy(source, name, target / name, max_bytes)
        if read_state(source.directory, choose) == before:
            return before
        for name, _ in before.files:
            (target / name).unlink()
    raise AdapterNotFoundError


def _await_rest(directory: Path, choose: Choose) -> FilesState:
    """Wait until every later write changes the state, and return it. Change times in the future are
    ignored."""
    state = read_state(directory, choose)
    rest_ns = state.changed_ns + CLOCK_NS - time.time_ns()
    if not state.is_settled and rest_ns <= CLOCK_NS:
        time.sleep(max(rest_ns, 0) / 1e9 + 0.001)
        state = read_state(directory, choose)
    return state


def _copy(source: AdapterDirectory, name: str, target: Path, max_bytes: int) -> None:
    with missing_as_not_found():
        file = source.directory / name
        real = find_inside(source.root, file) if source.root else file
        flags = os.O_RDONLY | os.O_NONBLOCK  # a pipe would block
        descriptor = os.open(real, flags | os.O_NOFOLLOW if source.root else flags)
        with os.fdopen(descriptor, "rb", buffering=0) as content, target.open("wb") as copy:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise AdapterNotFoundError
            if status.st_size > max_bytes:
                raise TooLargeError
            rest = status.st_size
            while rest > 0 and (chunk := content.read(min(CHUNK_BYTES, rest))):
                copy.write(chunk)
                rest -= len(chunk)


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
