"""Describes the set fields of a message for the log."""

from collections.abc import Iterator

from google.protobuf.message import Message


def describe_fields(message: Message) -> Iterator[str]:
    """Yield the set fields of a message, even later additions to the message, as numbers and names only."""
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):
            yield from describe_fields(value)
        elif isinstance(value, str):
            yield f"{descriptor.name}={len(value.encode())} bytes"
        elif descriptor.enum_type is not None:
            known = descriptor.enum_type.values_by_number.get(value)
            yield f"{descriptor.name}={known.name if known else value}"
        elif isinstance(value, float):
            yield f"{descriptor.name}={value:.6g}"
        elif isinstance(value, bool | int):
            yield f"{descriptor.name}={str(value).lower()}"
        else:
            yield f"{descriptor.name}={len(value)}"
