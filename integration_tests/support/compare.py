"""Compares whole messages field by field; only floats may differ, within a tolerance."""

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

RELATIVE, ABSOLUTE = 5e-4, 1e-4


def differences(expected: Message, got: Message, path: str = "") -> Iterator[str]:
    if len(UnknownFieldSet(got)):
        yield f"{path}: has unknown fields"
    for field in expected.DESCRIPTOR.fields:
        here, a, b = f"{path}.{field.name}", getattr(expected, field.name), getattr(got, field.name)
        if field.has_presence and expected.HasField(field.name) != got.HasField(field.name):
            yield f"{here}: expected presence {expected.HasField(field.name)}"
        elif field.is_repeated:
            yield from _lists(field, list(a), list(b), here)
        else:
            yield from _values(field, a, b, here)


def _lists(field: FieldDescriptor, expected: list[Any], got: list[Any], path: str) -> Iterator[str]:
    if len(expected) != len(got):
        yield f"{path}: expected {len(expected)} entries, got {len(got)}"
    for i, (a, b) in enumerate(zip(expected, got, strict=False)):
        yield from _values(field, a, b, f"{path}[{i}]")


def _values(field: FieldDescriptor, expected: Any, got: Any, path: str) -> Iterator[str]:
    if field.message_type:
        yield from differences(expected, got, path)
    elif isinstance(expected, float):
        # Clients compare JSON, which omits zero but not minus zero.
        is_minus_zero = got == 0 and math.copysign(1, got) < 0
        if is_minus_zero or not is_near(expected, got):
            yield f"{path}: expected {expected!r}, got {got!r}"
    elif expected != got:
        yield f"{path}: expected {expected!r}, got {got!r}"


def is_near(expected: float, got: float) -> bool:
    if math.isnan(expected) or math.isnan(got):
        return math.isnan(expected) and math.isnan(got)
    return math.isclose(expected, got, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
