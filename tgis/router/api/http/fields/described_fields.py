"""Describes the fields of a request for the log, without any of the client's text."""

from collections.abc import Iterator

import msgspec

UNLOGGED = frozenset(("model", "prompt", "messages"))


def describe_parameters(fields: msgspec.Struct) -> str:
    """Return the set fields for the log: numbers in full, texts by size, everything else by count."""
    return ", ".join(_set_fields(fields))


def _set_fields(fields: msgspec.Struct) -> Iterator[str]:
    for info in msgspec.structs.fields(fields):
        value = getattr(fields, info.name)
        if value is None or info.name in UNLOGGED:
            continue
        if isinstance(value, msgspec.Struct):
            yield from (f"{info.name}.{each}" for each in _set_fields(value))
        elif isinstance(value, str):
            yield f"{info.name}={len(value.encode())} bytes"
        elif isinstance(value, bool | int):
            yield f"{info.name}={str(value).lower()}"
        elif isinstance(value, float):
            yield f"{info.name}={value:.6g}"
        else:
            yield f"{info.name}={len(value)}"
