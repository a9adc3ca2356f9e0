"""Copies all files of a soft prompt or an adapter as they were at one moment, whatever changes later."""

import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tgis.prompts.errors import AdapterNotFoundError, TooLargeError
from tgis.prompts.ids import AdapterDirectory, find_inside, missing_as_not_found

# Two writes within this time may give a file the same time stamp.
CLOCK_NS = 50_000_000
TRIES = 8
CHUNK_BYTES = 1 << 20

Choose = Callable[[Collection[str]], Sequence[str]]


@dataclass(frozen=True)
class FilesState:
    """State of files, by which changes are noticed. `files` has their names, inodes, sizes and times."""

    directory: Path
    files: tuple[tuple[str, tuple[int, ...]], ...]
    changed_ns: int
    is_settled: bool = field(compare=False)
    """True if any later change will give another state than this one."""


def read_state(directory: Path, choose: Choose) -> FilesState:
    """Return the state of the files that `choose` selects. Raises AdapterNotFoundError and OSError."""
    now_ns = time.time_ns()
    with missing_as_not_found():
        names = choose(os.listdir(directory))
        found = {name: os.stat(directory / name) for name in names}
    if not all(stat.S_ISREG(one.st_mode) for one in found.values()):
        raise AdapterNotFoundError
    # Programs can set a file's modification time, but not its change time.
    changed_ns = max((one.st_ctime_ns for one in found.values()), default=0)
    files = tuple((name, _signature(one)) for name, one in found.items())
    return FilesState(directory, files, changed_ns, changed_ns < now_ns - CLOCK_NS)


def copy_files(source: AdapterDirectory, choose: Choose, target: Path, max_bytes: int) -> FilesState:
    """Copy the files into `target` and return their state at that moment. Each has at most `max_bytes`.
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
    """Return the state once any later write will change it. A change time in the future is not waited for."""
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
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise AdapterNotFoundError
            if found.st_size > max_bytes:
                raise TooLargeError
            rest = found.st_size
            while rest > 0 and (chunk := content.read(min(CHUNK_BYTES, rest))):
                copy.write(chunk)
                rest -= len(chunk)


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
