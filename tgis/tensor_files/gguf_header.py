"""Reads the header of an untrusted GGUF file: its metadata, and the positions of its tensors.

Every length is compared with the remaining bytes before anything is allocated. The `gguf` package's reader
creates an object for each token of a vocabulary, which takes seconds and hundreds of megabytes."""

import mmap
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TypeAlias

from tgis.tensor_files.errors import DAMAGED, TensorFileError
from tgis.tensor_files.gguf_types import TYPES, GgufType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
# Limits far above the values of published models.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_ELEMENTS = 1 << 21
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_NAME_BYTES = 256
MAX_TEXT_BYTES = 4 << 20
MAX_ARRAY_BYTES = 64 << 20
MAX_SIZE = 1 << 50

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TEXT, _ARRAY, _BOOL = 8, 9, 7
# Struct format and array typecode of each numeric type.
_NUMBERS = {
    0: ("<B", "B"),
    1: ("<b", "b"),
    2: ("<H", "H"),
    3: ("<h", "h"),
    4: ("<I", "I"),
    5: ("<i", "i"),
    6: ("<f", "f"),
    _BOOL: ("<?", "B"),
    10: ("<Q", "Q"),
    11: ("<q", "q"),
    12: ("<d", "d"),
}

Value: TypeAlias = "int | float | bool | str | list[str] | array[int] | array[float]"


@dataclass(frozen=True, slots=True)
class GgufTensorPlace:
    """Position of a tensor in a file. `shape` begins with the rows, as in torch."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensorPlace]


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a file. Raises TensorFileError, OSError."""
    with path.open("rb") as content:
        if content.read(len(MAGIC)) != MAGIC:
            raise TensorFileError(f"{path} is not a GGUF file")
        with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _read(path, _Cursor(path, mapped))


def _read(path: Path, cursor: "_Cursor") -> GgufHeader:
    version = cursor.integer(_U32, "version")
    if version not in VERSIONS:
        kind = "with big-endian numbers" if version & 0xFFFF == 0 else f"of version {version}"
        raise TensorFileError(f"{path} is a GGUF file {kind}; only versions 2 and 3 are supported")
    num_tensors = cursor.count("number of tensors", MAX_TENSORS)
    num_keys = cursor.count("number of keys", MAX_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.name("a key")
        if key in metadata:
            raise TensorFileError(f"{path}: key {key} occurs twice")
        metadata[key] = cursor.value(key)
    places = [_read_place(cursor) for _ in range(num_tensors)]
    alignment = _read_alignment(path, metadata)
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(path, metadata, _check_places(path, places, start, alignment, cursor.size))


def _read_place(cursor: "_Cursor") -> GgufTensorPlace:
    """Return the position of a tensor, with a start relative to the data section."""
    path = cursor.path
    name = cursor.name("name of a tensor")
    num_dimensions = cursor.integer(_U32, name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise TensorFileError(f"{path}: tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.integer(_U64, name) for _ in range(num_dimensions))[::-1]
    number, start = cursor.integer(_U32, name), cursor.integer(_U64, name)
    if number not in TYPES:
        raise TensorFileError(f"{path}: tensor {name} has the unknown type {number}")
    type = TYPES[number]
    if not all(shape) or prod(shape) > MAX_SIZE:
        raise TensorFileError(f"{path}: tensor {name} has the impossible shape {list(shape)}")
    if shape[-1] % type.block_elements:
        raise TensorFileError(
            f"{path}: tensor {name} has rows of {shape[-1]} elements, not whole blocks of {type.name}"
        )
    num_bytes = prod(shape) // type.block_elements * type.block_bytes
    return GgufTensorPlace(name, type, shape, start, num_bytes)


def _read_alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise TensorFileError(f"{path}: {ALIGNMENT_KEY} {str(alignment)[:40]} is not a valid alignment")
    return alignment


def _check_places(
    path: Path, places: list[GgufTensorPlace], start: int, alignment: int, size: int
) -> dict[str, GgufTensorPlace]:
    """Return the tensors by name, with starts relative to the file, after checks of bounds and overlaps."""
    tensors: dict[str, GgufTensorPlace] = {}
    for each in places:
        if each.name in tensors:
            raise TensorFileError(f"{path}: tensor {each.name} occurs twice")
        if each.start % alignment:
            raise TensorFileError(f"{path}: tensor {each.name} is not aligned to {alignment} bytes")
        if start + each.start + each.num_bytes > size:
            raise TensorFileError(f"{path} {DAMAGED}: tensor {each.name} ends after the file")
        tensors[each.name] = GgufTensorPlace(
            each.name, each.type, each.shape, start + each.start, each.num_bytes
        )
    for first, second in pairwise(sorted(tensors.values(), key=lambda each: each.start)):
        if first.start + first.num_bytes > second.start:
            raise TensorFileError(f"{path}: tensors {first.name} and {second.name} overlap")
    return tensors


class _Cursor:
    """Read position in a memory-mapped file. Errors name the file and the value being read."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._mapped = mapped
        self.size = len(mapped)
        self.position = len(MAGIC)
        self._elements_left = MAX_ELEMENTS

    def integer(self, kind: struct.Struct, what: str) -> int:
        return int(kind.unpack_from(self._mapped, self._take(kind.size, what))[0])

    def count(self, what: str, maximum: int) -> int:
        number = self.integer(_U64, what)
        if number > maximum:
            raise TensorFileError(f"{self.path}: {what} is {number}, more than the limit of {maximum}")
        return number

    def text(self, what: str, maximum: int = MAX_TEXT_BYTES) -> str:
        length = self.count(f"length of {what}", maximum)
        start = self._take(length, what)
        try:
            return self._mapped[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise TensorFileError(f"{self.path}: {what} is not UTF-8") from error

    def name(self, what: str) -> str:
        """Return a printable name. Raises TensorFileError."""
        name = self.text(what, MAX_NAME_BYTES)
        if not name.isprintable():
            raise TensorFileError(f"{self.path}: {what} is not printable")
        return name

    def value(self, key: str) -> Value:
        kind = self.integer(_U32, key)
        if kind == _TEXT:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise TensorFileError(f"{self.path}: {key} has the unknown type {kind}")
        format = struct.Struct(_NUMBERS[kind][0])
        scalar: Value = format.unpack_from(self._mapped, self._take(format.size, key))[0]
        return scalar

    def _array(self, key: str) -> Value:
        kind = self.integer(_U32, key)
        count = self.count(f"number of elements of {key}", MAX_ELEMENTS)
        self._elements_left -= count
        if self._elements_left < 0:
            raise TensorFileError(
                f"{self.path}: {key}: there are more than {MAX_ELEMENTS} elements of arrays"
            )
        if kind == _TEXT:
            return self._texts(key, count)
        if kind not in _NUMBERS:
            raise TensorFileError(f"{self.path}: {key} is an array of the unknown type {kind}")
        elements: array[int] | array[float] = array(_NUMBERS[kind][1])
        num_bytes = count * elements.itemsize
        start = self._take(num_bytes, key)
        elements.frombytes(self._mapped[start : start + num_bytes])
        return elements

    def _texts(self, key: str, count: int) -> list[str]:
        """Return an array of texts. It has 200,000 entries in a vocabulary, so the loop calls no method."""
        mapped = self._mapped
        position = self.position
        end = min(self.size, position + MAX_ARRAY_BYTES)
        unpack: Callable[[mmap.mmap, int], tuple[int]] = _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(mapped, position)
                position += 8 + length
                if position > end:
                    raise TensorFileError(f"{self.path} {DAMAGED}: {key} ends after the file or is too long")
                texts.append(mapped[position - length : position].decode())
        except struct.error as error:
            raise TensorFileError(f"{self.path} {DAMAGED}: {key} ends after the file") from error
        except UnicodeDecodeError as error:
            raise TensorFileError(f"{self.path}: {key} is not UTF-8") from error
        self.position = position
        return texts

    def _take(self, num_bytes: int, what: str) -> int:
        """Return the current position and advance it. Raises TensorFileError beyond the file's end."""
        start = self.position
        if num_bytes > self.size - start:
            raise TensorFileError(f"{self.path} {DAMAGED}: {what} ends after the file")
        self.position = start + num_bytes
        return start
