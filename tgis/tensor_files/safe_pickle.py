"""Reads tensors written by torch.save, and allows only the calls that build tensors.

torch's reader does not limit memory and does not detect damage, so untrusted files are checked first."""

import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tgis.tensor_files.errors import DAMAGED, TensorFileError

# Maximum size of an untrusted file without the tensors' elements; as Python objects, these bytes need about
# fifty times as much memory.
MAX_PICKLE_BYTES = 4 << 20
OLD_PICKLES = 5  # number of pickles at the beginning of a file from before torch 1.6
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
# All names that a pickle needs to build plain tensors and parameters.
_NEEDED = re.compile(
    r"torch \w+Storage|collections OrderedDict|torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)"
)
_OTHER_CALLS = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
# Last three records of a zip archive without a comment: the zip64 end of the central directory, the locator
# of that record, and the 32-bit end of the central directory. Only archives in zip64 format have the first
# two. The struct reads their signatures, both lengths of the directory, and the length of the comment.
_END = struct.Struct("<4s36xQ8x 4s16x 4s8xI4xH")
_LARGE, _LOCATOR, _SMALL = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"


def open_pickle(file: Path) -> dict[str, Any]:
    """Return tensors by name, memory-mapped if written since torch 1.6. Raises TensorFileError, OSError."""
    content = _load(file)
    if not isinstance(content, dict):
        raise TensorFileError(f"{file} is not a mapping of names to tensors")
    return content


def load_untrusted(file: Path) -> object:
    """Return the object in the file. Its tensors are memory-mapped, so the file must not change.

    Raises TensorFileError, OSError and MemoryError."""
    with _errors_as_damage(file):
        _check_archive(file) if can_map(file) else _check_old(file)
    return _load(file)


def can_map(file: Path) -> bool:
    """Return True if the file is a zip archive, the only format that can be memory-mapped. Raises OSError."""
    with file.open("rb") as content:
        return content.read(len(_ZIP)) == _ZIP


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Return True for a strided tensor in the CPU's memory."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _load(file: Path) -> object:
    with _errors_as_damage(file), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of an unusual pickle protocol
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=can_map(file))
    return content


@contextmanager
def _errors_as_damage(file: Path) -> Iterator[None]:
    """Convert all errors except missing files and memory to TensorFileError: readers of damage may raise
    any."""
    try:
        yield
    except (TensorFileError, FileNotFoundError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise _refusal(file, error) from error
    except Exception as error:
        raise TensorFileError(f"{file} {DAMAGED}") from error


def _refusal(file: Path, error: pickle.UnpicklingError) -> TensorFileError:
    refused = _GLOBAL.search(str(error))
    if refused is None:
        return TensorFileError(f"{file} {DAMAGED}, or not a pickle of tensors")
    if _ends_within(file, refused[1]):
        return TensorFileError(f"{file} {DAMAGED}")
    return _refused_call(file, refused[1])


def _refused_call(file: Path, what: str) -> TensorFileError:
    return TensorFileError(f"{file} calls {what}, which tensors do not need; it was not run")


def _ends_within(file: Path, name: str) -> bool:
    """Return True if the file ends within `name`, the name of a call.

    A complete pickle has line breaks after the module and the attribute. torch drops the last character of
    both, whatever it is."""
    module, _, attribute = name.rpartition(".")
    begun = tuple(f"c{text}".encode() for text in (module, f"{module}\n{attribute}"))
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - len(name) - 3))
        tail = content.read()
    return tail.endswith(begun) or tail[:-1].endswith(begun)


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
                raise TensorFileError(f"{file} {DAMAGED}")
            for record in pickles:
                _check_calls(file, archive.read(record), 1)


def _check_end(file: Path, end: bytes) -> None:
    """Check the end of the archive and the size of its directory, which zipfile reads as a whole.

    Like zipfile, this uses the size in the zip64 record if there is one. Raises TensorFileError."""
    large, large_bytes, locator, small, small_bytes, comment_bytes = _END.unpack(end)
    is_plain = small == _SMALL and not comment_bytes and (large == _LARGE) == (locator == _LOCATOR)
    if not is_plain or (large_bytes if locator == _LOCATOR else small_bytes) > MAX_PICKLE_BYTES:
        raise TensorFileError(f"{file} {DAMAGED}")


def _check_old(file: Path) -> None:
    with file.open("rb") as content:
        _check_calls(file, content.read(MAX_PICKLE_BYTES), OLD_PICKLES)


def _check_calls(file: Path, content: bytes, num_pickles: int) -> None:
    stream = BytesIO(content)
    for _ in range(num_pickles):
        for operation, name, _ in pickletools.genops(stream):
            is_call = operation.name == "GLOBAL" and not _NEEDED.fullmatch(str(name))
            if is_call or operation.name in _OTHER_CALLS:
                what = str(name).replace(" ", ".") if is_call else "an unnamed function"
                raise _refused_call(file, what)
