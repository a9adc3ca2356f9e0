"""Reads small, untrusted files that torch.save wrote.

torch's own reader runs no code from such a file, but the file can make it allocate any amount of memory, and
it does not detect damage. The checks here refuse both before torch reads the file."""

import pickletools
import re
import struct
import zipfile
from io import BytesIO
from pathlib import Path

from tgis.tensor_files.safe_pickle import TORN, PickleError, can_map, load_pickle

# Most bytes of a file besides the tensors' elements; as Python objects they take about fifty times as much.
MAX_PICKLE_BYTES = 4 << 20
OLD_PICKLES = 5  # number of pickles at the beginning of a file from before torch 1.6
# All names that a pickle needs to build plain tensors and parameters, alone or by name.
_NEEDED = re.compile(
    r"torch \w+Storage|collections OrderedDict|torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)"
)
_OTHER_CALLS = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
# Last three records of a zip archive without a comment: the zip64 end of the central directory, the locator
# of that record, and the end of the central directory in 32 bits. Only archives in zip64 format have the
# first two. The struct reads their signatures, both lengths of the directory, and the length of the comment.
_END = struct.Struct("<4s36xQ8x 4s16x 4s8xI4xH")
_LARGE, _LOCATOR, _SMALL = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"


def load_small(file: Path) -> object:
    """Return the object in the file; its tensors are mapped from the file, so the file must not change.

    Raises PickleError, which names the file; OSError, MemoryError."""
    try:
        _check_archive(file) if can_map(file) else _check_old(file)
    except (PickleError, FileNotFoundError, MemoryError):
        raise
    # On a damaged file the readers may raise any exception.
    except Exception as error:
        raise PickleError(f"{file} {TORN}") from error
    return load_pickle(file)


def _check_archive(file: Path) -> None:
    with file.open("rb") as content:
        content.seek(-_END.size, 2)
        _check_end(file, content.read())
        with zipfile.ZipFile(content) as archive:
            records = archive.infolist()
            is_plain = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            pickles = [record for record in records if record.filename.endswith("data.pkl")]
            is_short = all(record.file_size <= MAX_PICKLE_BYTES for record in pickles)
            if not (is_plain and is_short) or archive.testzip():
                raise PickleError(f"{file} {TORN}")
            for record in pickles:
                _check_calls(file, archive.read(record), 1)


def _check_end(file: Path, end: bytes) -> None:
    """Check that the archive's end is well-formed and its directory has at most MAX_PICKLE_BYTES.

    zipfile reads the whole directory into memory, and uses the zip64 record's length if there is one.

    Raises PickleError."""
    large, large_bytes, locator, small, small_bytes, comment_bytes = _END.unpack(end)
    is_plain = small == _SMALL and not comment_bytes and (large == _LARGE) == (locator == _LOCATOR)
    if not is_plain or (large_bytes if locator == _LOCATOR else small_bytes) > MAX_PICKLE_BYTES:
        raise PickleError(f"{file} {TORN}")


def _check_old(file: Path) -> None:
    with file.open("rb") as content:
        _check_calls(file, content.read(MAX_PICKLE_BYTES), OLD_PICKLES)


def _check_calls(file: Path, content: bytes, num_pickles: int) -> None:
    stream = BytesIO(content)
    for _ in range(num_pickles):
        for operation, name, _ in pickletools.genops(stream):
            is_call = operation.name == "GLOBAL" and not _NEEDED.fullmatch(str(name))
            if is_call or operation.name in _OTHER_CALLS:
                what = str(name).replace(" ", ".") if is_call else "what it does not name"
                raise PickleError(f"{file} wants to call {what}, which tensors do not need; it was not run")
