"""Describes the field of a JSON body that is missing, has a wrong type or is out of range."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

BODY = "the body"
NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
"""Names of msgspec's types where they are expected."""
GIVEN_NAMES = {**NAMES, "bool": "a boolean", "null": "null"}

_MISSING = re.compile(r"Object missing required field `(.+)`")
_TYPE = re.compile(r"Expected `(.+)`, got `(.+)`")
_BOUND = re.compile(r"Expected `\w+` ([<>]=?) (.+)")


class InvalidField(NamedTuple):
    path: str
    """Path of the field, such as `messages[0].role`; empty for the body itself."""
    text: str
    """Sentence that names the path and quotes no value."""


def describe_invalid(error: msgspec.ValidationError, kind: Any) -> InvalidField:
    """Return the field that msgspec refuses in a body of type `kind`."""
    reason, _, place = str(error).partition(" - at `")
    path = place.rstrip("`").removeprefix("$").removeprefix(".")
    if missing := _MISSING.fullmatch(reason):
        path = f"{path}.{missing[1]}".lstrip(".")
        return InvalidField(path, f"{path} is required")
    field = path.removesuffix("[...]")
    subject = path if path == field else f"each value of {field}"
    return InvalidField(field, f"{subject or BODY} {_rule(reason, path, kind)}")


def _rule(reason: str, path: str, kind: Any) -> str:
    """Return the rule that a field breaks."""
    if wrong := _TYPE.fullmatch(reason):
        expected = [NAMES.get(each, each) for each in wrong[1].split(" | ") if each != "null"]
        return f"must be {_listed(expected)}, not {_given(wrong[2], expected)}"
    if bound := _BOUND.fullmatch(reason):
        return f"must be {bound[1]} {bound[2]}"
    if reason.endswith("out of range"):
        return "is out of range"
    if choices := [str(each) for each in _choices(inspect.type_info(kind), _steps(path))]:
        return f"must be {_listed(choices)}"
    return "is not valid"


def _given(kind: str, expected: list[str]) -> str:
    """Return the name of a wrong value's type. Only where integers are allowed, msgspec's `float` is surely
    no integer: elsewhere, it may also be one of more than 64 bits."""
    if kind == "float" and NAMES["int"] in expected:
        return "a floating-point number"
    return GIVEN_NAMES.get(kind, kind)


def _listed(words: list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _steps(path: str) -> list[str]:
    """Return the fields of a path, with an empty name for each element of a list."""
    return [name.rstrip("]0123456789.") if name.endswith("]") else name for name in re.split(r"\.|\[", path)]


def _choices(kind: inspect.Type, steps: list[str]) -> Iterator[object]:
    """Yield the values that the field at the end of a path may have, if they are listed."""
    match kind, steps:
        case inspect.UnionType(types), _:
            for each in types:
                yield from _choices(each, steps)
        case inspect.LiteralType(values), []:
            yield from values
        case inspect.ListType(item_type=item), ["", *rest]:
            yield from _choices(item, rest)
        case inspect.StructType(fields=fields), [name, *rest]:
            for field in fields:
                if field.encode_name == name:
                    yield from _choices(field.type, rest)
