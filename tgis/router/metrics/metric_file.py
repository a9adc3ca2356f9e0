"""Memory-mapped file of cells that one process writes and others read, so that metrics survive the process. A
record is complete before the length in the header includes it. So readers see whole records, as does the
slot's next process after a crash at any point. The format is specific to the machine and this version.

The header is MAGIC and the length of all written data, 8 bytes each. A record consists of a checksum of its
fields before the cells, the length of its text, its number of cells, 4 empty bytes, the text (JSON: name,
layout and label values) padded to a multiple of 8 bytes, and the cells."""

# prometheus_client's multiprocess mode is no replacement. With 43 families of 3 processes, an increment took
# 2.8 µs instead of 0.4, an observation 8.8 µs instead of 1.7, and a scrape 116 ms instead of 69. It has no
# quantiles, and each restart of a process adds a file that all later scrapes read.

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
SEGMENT = 1 << 18  # minimum number of bytes by which a file grows

RecordPlace = tuple[SeriesKey, Labels, int]
"""Key of a record, its label values, and the offset of its cells."""


class MetricFile(MemoryStorage):
    """Storage in the file of a process slot. The next process of the slot continues with its values."""

    is_shared = True

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StartupError, also if another process writes to it."""
        super().__init__()
        self._path = path
        self.is_reopened = path.exists()
        self._has_room = True
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._fd = self._open()
            self._size = os.fstat(self._fd).st_size
            self._begin = 0
            self._map = mmap.mmap(self._fd, self._size)
        except OSError as error:
            raise StartupError(f"metrics cannot be stored in {path}: {error.strerror}") from error
        self._length = memoryview(self._map)[8 : HEADER.size].cast("Q")
        self._end = HEADER.size
        self._continue()

    def close(self) -> None:
        """Unlock the file, so that another process can write to it."""
        # Closing the descriptor would not unlock it, because the mappings have copies of it.
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self) -> int:
        """Open and lock the file, or replace it if it is not a metric file. Raises StartupError and
        OSError."""
        if self.is_reopened:
            fd = os.open(self._path, os.O_RDWR)
            _lock(fd, self._path)
            header = os.pread(fd, HEADER.size, 0)
            size = os.fstat(fd).st_size
            if header.startswith(MAGIC) and len(header) == HEADER.size:
                self._extend(fd, size, HEADER.unpack(header)[1])
                return fd
            os.close(fd)
            logger.warning("%s is damaged or not a metric file; its counters begin at 0", self._path)
        return self._create()

    def _extend(self, fd: int, size: int, length: int) -> None:
        """Extend the file to whole segments. If it is too short, shorten its length first, so that missing
        data is not read as zeros."""
        if length > size:
            logger.warning("%s is truncated; its last records are lost", self._path)
            os.pwrite(fd, HEADER.pack(MAGIC, size), 0)
        os.posix_fallocate(fd, 0, _padded(size, SEGMENT))

    def _create(self) -> int:
        """Create an empty file. It gets its name only when its header is complete."""
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        _lock(fd, self._path)
        os.posix_fallocate(fd, 0, SEGMENT)
        os.pwrite(fd, HEADER.pack(MAGIC, HEADER.size), 0)
        new.rename(self._path)
        return fd

    def _continue(self) -> None:
        """Continue the records of the slot's earlier processes."""
        for key, labels, offset in _scan(self._map):
            self._end = offset + 8 * key.num_cells
            self._records.setdefault(key, {})[labels] = self._cells(offset, key.num_cells)
        if self._end != self._length[0]:
            logger.warning("%s is damaged; its last records are lost", self._path)
            self._length[0] = self._end

    def _make_cells(self, key: SeriesKey, labels: Labels) -> Cells:
        """Append the cells of a new series. If the disk is full, only this process has them."""
        try:
            return self._append(key, labels)
        except OSError as error:
            self._warn_disk_full(error)
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
        """Append a segment and map it, from the page with the end of the records on. Earlier mappings are
        kept, because their cells are in use."""
        size = self._size + _padded(needed, SEGMENT)
        # Unlike a truncation, this allocates disk space now: on a full disk, a later write would kill the
        # process.
        os.posix_fallocate(self._fd, self._size, size - self._size)
        begin = self._end // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._map = mmap.mmap(self._fd, size - begin, offset=begin)
        self._begin = begin
        self._size = size

    def _cells(self, offset: int, num_cells: int) -> Cells:
        begin = offset - self._begin
        return memoryview(self._map)[begin : begin + 8 * num_cells].cast("d")

    def _warn_disk_full(self, error: OSError) -> None:
        if self._has_room:
            self._has_room = False
            logger.warning("%s cannot grow, so new series are not shared: %s", self._path, error.strerror)


def read_records(directory: Path) -> list[Records]:
    """Return the records of all files in the directory, one mapping per file."""
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


def _scan(data: mmap.mmap) -> Iterator[RecordPlace]:
    """Yield the records of a file, up to the first incomplete one."""
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
    """Encode the part of a record before its cells."""
    text = json.dumps([key.name, key.layout, *labels]).encode()
    numbers = len(text), key.num_cells, 0
    checksum = crc32(HEAD.pack(0, *numbers)[CHECKSUM_SIZE:] + text)
    return (HEAD.pack(checksum, *numbers) + text).ljust(_padded(HEAD.size + len(text)), b"\0")


def _padded(size: int, unit: int = 8) -> int:
    return -(-size // unit) * unit


def _lock(fd: int, path: Path) -> None:
    """Lock the file. Raises StartupError if another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StartupError(f"another process stores its metrics in {path}") from error
