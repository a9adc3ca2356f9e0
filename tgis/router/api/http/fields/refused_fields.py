"""Refuses fields of requests that are known but not supported, each with a reason."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

MEANINGLESS: tuple[object, ...] = (None, False, "", [], {})


class RefusedField(NamedTuple):
    reason: str
    defaults: tuple[object, ...] = ()
    """Values that request the service's own behaviour."""


def find_refused(fields: msgspec.Struct, table: Mapping[str, RefusedField]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a table that request something unsupported, each with the text of its refusal."""
    for name, refused in table.items():
        value: Any = getattr(fields, name, None)
        is_on = any(each is True for each in refused.defaults)  # False is then a request for other behaviour
        allowed = refused.defaults if is_on else MEANINGLESS + refused.defaults
        if value is not None and not _is_among(value, allowed):
            yield name, f"{name} is not supported. {refused.reason}"


def _is_among(value: object, allowed: tuple[object, ...]) -> bool:
    """Return True for an allowed value. Here True differs from 1 and False from 0."""
    return any(value == one and (isinstance(value, bool) == isinstance(one, bool)) for one in allowed)
