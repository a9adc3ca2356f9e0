"""Builds GGUF files byte by byte, so that any part of them can be wrong."""

import struct
from collections.abc import Sequence

U32, F32, BOOL, TEXT, ARRAY, U64 = 4, 6, 7, 8, 9, 10
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", 5: "<i", F32: "<f", BOOL: "<?", U64: "<Q", 12: "<d"}


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def scalar(kind: int, value: object) -> bytes:
    return text(str(value)) if kind == TEXT else struct.pack(FORMATS[kind], value)


def key(name: str, kind: int, value: object) -> bytes:
    return text(name) + struct.pack("<I", kind) + scalar(kind, value)


def array(name: str, kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    """Encode an array. `count` replaces its true length."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return text(name) + head + b"".join(scalar(kind, value) for value in values)


def place(name: str, shape: Sequence[int] = (32,), kind: int = 0, start: int = 0) -> bytes:
    """Encode a tensor's entry. `shape` has the rows last, as in the file."""
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, start)


def file(
    keys: Sequence[bytes] = (),
    places: Sequence[bytes] = (),
    data: bytes = b"",
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:
    """Build a file. `counts` replaces the true numbers of tensors and keys."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(places), len(keys))))
    header = head + b"".join((*keys, *places))
    return header + bytes(-len(header) % 32) + data
