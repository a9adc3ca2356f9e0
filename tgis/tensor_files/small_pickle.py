"""Reads small files of torch.save's that nobody vouches for. torch's own reader runs nothing that such a file
holds, but lets it ask for any amount of memory, and does not notice damage; here neither gets as far."""

import pickletools
import re
import struct
import zipfile
from io import BytesIO
from pathlib import Path

from tgis.tensor_files.safe_pickle import TORN, PickleError, can_map, load_pickle

# What a file says beside the tensors' elements; as objects it takes some fifty times as much.
MAX_PICKLE_BYTES = 4 << 20
OLD_PICKLES = 5  # that a file from before torch 1.6 begins with
# All that plain tensors and parameters, alone or by name, are built of.
_NEEDED = re.compile(
    r"torch \w+Storage|collections OrderedDict|torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)"
)
_OTHER_CALLS = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
# Three records end an archive that has no comment, the first two only one that may be large: where its
# directory is and how long, where to find that record, and the first again in 32 bits. Their signatures, both
# lengths, and the length of the comment.
_END = struct.Struct("<4s36xQ8x 4s16x 4s8xI4xH")
_LARGE, _LOCATOR, _SMALL = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"


def load_small(file: Path) -> object:
    """What the file has; its tensors are mapped from it, so that nobody may write to it.

    Raises PickleError, which names it; OSError, MemoryError."""
    try:
        _check_archive(file) if can_map(file) else _check_old(file)
    except (PickleError, FileNotFoundError, MemoryError):
        raise
    # Of a damaged file the readers raise whatever they stumble over.
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
    """The library reads the directory as a whole, and believes the larger record where there is one."""
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
