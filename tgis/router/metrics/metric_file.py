"""File of cells that one process writes and others read, mapped into memory, so that its numbers survive its
death. A record is complete before the header's length reaches it: a reader, and the next process of the slot
after a crash at any point, find whole records. The format is that of the machine and of this version alone.

The header is MAGIC and the length of everything written, in 8 bytes each. A record is a checksum of what
follows up to the cells, the length of its text, the number of its cells, 4 empty bytes, the text (JSON: name,
layout and label values) up to a multiple of 8 bytes, and the cells."""

import fcntl
import json
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from tgis.router.errors import StartupError
from tgis.router.metrics.storage import Cells, Labels, MemoryStorage, Records, SeriesKey

logger = logging.getLogger(__name__)

SUFFIX = ".metrics"
MAGIC = b"TGISMET1"
HEADER = struct.Struct("=8sQ")
HEAD = struct.Struct("=IIII")
CHECKSUM_SIZE = 4
SEGMENT = 1 << 18  # bytes by which a file grows, at least

Found = tuple[SeriesKey, Labels, int]
"""A record's key, its label values, and the offset of its cells."""


class MetricFile(MemoryStorage):
    """Storage in the file of a process slot. The next process of the slot continues with its values."""

    is_shared = True

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises StartupError, also if another process writes it."""
        super().__init__()
        self._path, self.is_reopened = path, path.exists()
        self._has_room = True
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._fd = self._open()
            self._size = os.fstat(self._fd).st_size
            self._begin, self._map = 0, mmap.mmap(self._fd, self._size)
        except OSError as error:
            raise StartupError(f"metrics cannot be kept in {path}: {error.strerror}") from error
        self._length = memoryview(self._map)[8 : HEADER.size].cast("Q")
        self._end = HEADER.size
        self._continue()

    def close(self) -> None:
        """Let another process write the file."""
        # The mappings have copies of the descriptor, with which the lock would live on.
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self) -> int:
        """Open and lock the file, and replace it if it is not one of these. Raises StartupError, OSError."""
        if self.is_reopened:
            fd = os.open(self._path, os.O_RDWR)
            _lock(fd, self._path)
            header, size = os.pread(fd, HEADER.size, 0), os.fstat(fd).st_size
            if header.startswith(MAGIC) and len(header) == HEADER.size:
                self._extend(fd, size, HEADER.unpack(header)[1])
                return fd
            os.close(fd)
            logger.warning("%s is damaged or no file of metrics; its counters begin with 0", self._path)
        return self._make()

    def _extend(self, fd: int, size: int, length: int) -> None:
        """Make the file whole segments. What it has too few must not be taken for zeros of its records."""
        if length > size:
            logger.warning("%s is cut short; its last records are lost", self._path)
            os.pwrite(fd, HEADER.pack(MAGIC, size), 0)
        os.posix_fallocate(fd, 0, _padded(size, SEGMENT))

    def _make(self) -> int:
        """Make an empty file, which readers see when its header is there."""
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        _lock(fd, self._path)
        os.posix_fallocate(fd, 0, SEGMENT)
        os.pwrite(fd, HEADER.pack(MAGIC, HEADER.size), 0)
        new.rename(self._path)
        return fd

    def _continue(self) -> None:
        """Take over the records of the processes before this one."""
        for key, labels, offset in _scan(self._map):
            self._end = offset + 8 * key.num_cells
            self._records.setdefault(key, {})[labels] = self._cells(offset, key.num_cells)
        if self._end != self._length[0]:
            logger.warning("%s is damaged; its last records are lost", self._path)
            self._length[0] = self._end

    def _make_cells(self, key: SeriesKey, labels: Labels) -> Cells:
        """Append the cells of a new series. Where the disk is full, nobody but this process sees them."""
        try:
            return self._append(key, labels)
        except OSError as error:
            self._warn_of_room(error)
            return super()._make_cells(key, labels)

    def _append(self, key: SeriesKey, labels: Labels) -> Cells:
        """Write a record of zeros. Raises OSError if the disk is full."""
        head = _encode(key, labels)
        size = len(head) + 8 * key.num_cells
        if self._end + size > self._size:
            self._grow(size)
        begin = self._end - self._begin
        self._map[begin : begin + size] = head + bytes(8 * key.num_cells)
        cells = self._cells(self._end + len(head), key.num_cells)
        self._end += size
        self._length[0] = self._end
        return cells

    def _grow(self, needed: int) -> None:
        """Append a segment and map it, from the page on that holds the end of the records: earlier mappings
        stay, because their cells are in use."""
        size = self._size + _padded(needed, SEGMENT)
        # Unlike a truncation, it takes the room now: without any, writing would kill the process.
        os.posix_fallocate(self._fd, self._size, size - self._size)
        begin = self._end // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._map = mmap.mmap(self._fd, size - begin, offset=begin)
        self._begin, self._size = begin, size

    def _cells(self, offset: int, num_cells: int) -> Cells:
        begin = offset - self._begin
        return memoryview(self._map)[begin : begin + 8 * num_cells].cast("d")

    def _warn_of_room(self, error: OSError) -> None:
        if self._has_room:
            self._has_room = False
            logger.warning("%s cannot grow, so new series are left out: %s", self._path, error.strerror)


def read_records(directory: Path) -> list[Records]:
    """Return the records of all files of the directory, one mapping for each file."""
    return [_read(path) for path in sorted(directory.glob(f"*{SUFFIX}"))]


def _read(path: Path) -> Records:
    records: dict[SeriesKey, dict[Labels, Cells]] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < HEADER.size:
            return records
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for key, labels, offset in _scan(mapped):
            cells = memoryview(mapped)[offset : offset + 8 * key.num_cells].cast("d")
            records.setdefault(key, {})[labels] = cells
    return records


def _scan(data: mmap.mmap) -> Iterator[Found]:
    """Yield the records of a file, up to the first one that is not whole."""
    if data[: len(MAGIC)] != MAGIC:
        return
    end = min(memoryview(data)[8 : HEADER.size].cast("Q")[0], len(data))
    begin = HEADER.size
    while begin + HEAD.size <= end:
        checksum, num_text, num_cells, _ = HEAD.unpack_from(data, begin)
        offset = begin + _padded(HEAD.size + num_text)
        if offset + 8 * num_cells > end:
            return
        if crc32(data[begin + CHECKSUM_SIZE : begin + HEAD.size + num_text]) != checksum:
            return
        name, layout, *labels = json.loads(data[begin + HEAD.size : begin + HEAD.size + num_text])
        yield SeriesKey(name, layout, num_cells), tuple(labels), offset
        begin = offset + 8 * num_cells


def _encode(key: SeriesKey, labels: Labels) -> bytes:
    """Return everything of a record before its cells."""
    text = json.dumps([key.name, key.layout, *labels]).encode()
    numbers = len(text), key.num_cells, 0
    checksum = crc32(HEAD.pack(0, *numbers)[CHECKSUM_SIZE:] + text)
    return (HEAD.pack(checksum, *numbers) + text).ljust(_padded(HEAD.size + len(text)), b"\0")


def _padded(size: int, unit: int = 8) -> int:
    return -(-size // unit) * unit


def _lock(fd: int, path: Path) -> None:
    """Raise StartupError if another process has the lock of the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StartupError(f"another process keeps its metrics in {path}") from error
