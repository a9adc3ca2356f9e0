"""Numbers in JSON schemas. The grammar library stores them as float64 and 64-bit integers, and handles some
ranges wrongly. Bounds that it cannot represent are moved inwards, so that every generated number is valid;
values that it cannot write are rejected."""

import math
from decimal import Decimal
from typing import Any

from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.subschemas import Schema

# The library writes no integers of 19 digits if a range has only the bound that is nearer to 0.
MAX_BOUND = 9_200_000_000_000_000_000
MAX_INNER_BOUND = 10**18 - 1
MAX_EXACT = 2**53
# Distance by which an exclusive bound is moved if the library would include the bound.
INWARDS = Decimal("1e-9")
LOWER = "minimum"
UPPER = "maximum"
_EXCLUSIVE = {LOWER: "exclusiveMinimum", UPPER: "exclusiveMaximum"}


def make_exact(schema: Schema) -> None:
    """Adapt the bounds of a schema's own numbers. Raises InvalidGrammarError if that is impossible."""
    for value in [schema.get("const"), *_list(schema.get("enum"))]:
        _check_value(value)
    lower = _bound(schema, LOWER)
    upper = _bound(schema, UPPER)
    if lower is None and upper is None:
        return
    if _is_integer(schema):
        lower, upper = _to_integers(lower, upper)
    else:
        lower, upper = _exclude_bounds(lower, upper)
    for key in (LOWER, UPPER, *_EXCLUSIVE.values()):
        schema.pop(key, None)
    for key, bound in ((LOWER, lower), (UPPER, upper)):
        if bound is not None:
            value, is_exclusive = bound
            schema[_EXCLUSIVE[key] if is_exclusive else key] = _represent(value, key)


Bound = tuple[Decimal, bool]
"""Bound, and whether it is exclusive."""


def _bound(schema: Schema, key: str) -> Bound | None:
    """Return the tighter of the inclusive and the exclusive bound."""
    bounds = [
        (_decimal(schema[name]), is_exclusive)
        for name, is_exclusive in ((key, False), (_EXCLUSIVE[key], True))
        if _is_number(schema.get(name))
    ]
    if not bounds:
        return None
    sign = 1 if key == LOWER else -1
    return max(bounds, key=lambda bound: (sign * bound[0], bound[1]))


def _to_integers(lower: Bound | None, upper: Bound | None) -> tuple[Bound | None, Bound | None]:
    """Convert bounds to inclusive bounds of integers."""
    if lower is not None:
        value, is_exclusive = lower
        lower = Decimal(math.floor(value) + 1 if is_exclusive else math.ceil(value)), False
    if upper is not None:
        value, is_exclusive = upper
        upper = Decimal(math.ceil(value) - 1 if is_exclusive else math.floor(value)), False
    return lower, upper


def _exclude_bounds(lower: Bound | None, upper: Bound | None) -> tuple[Bound | None, Bound | None]:
    """Return bounds such that the library excludes the exclusive ones.

    The library includes an exclusive bound if it is an integer and the other bound has the same integer
    part."""
    if lower is None or upper is None or lower[0] >= upper[0]:
        return lower, upper
    if lower[1] and _is_whole(lower[0]) and math.trunc(upper[0]) == lower[0]:
        lower = lower[0] + INWARDS, False
    if upper[1] and _is_whole(upper[0]) and math.trunc(lower[0]) == upper[0]:
        upper = upper[0] - INWARDS, False
    return lower, upper


def _represent(value: Decimal, key: str) -> int | float:
    """Return the nearest bound inwards that the library can represent. Raises InvalidGrammarError."""
    sign = 1 if key == LOWER else -1  # direction inwards
    value = max(sign * value, Decimal(-MAX_BOUND)) * sign
    if not _is_whole(value):
        return float(value)
    bound = int(value)
    if abs(bound) > MAX_EXACT:
        bound = int(float(bound))
        while sign * bound < sign * value:
            bound = int(math.nextafter(float(bound), sign * math.inf))
    if sign * bound > MAX_INNER_BOUND:
        raise InvalidGrammarError(
            f"{key} {_show(value)} is not possible: numbers of more than 18 digits cannot be required"
        )
    return bound


def _check_value(value: Any) -> None:
    """Raise InvalidGrammarError for an integer that the library would write with wrong digits."""
    if type(value) is int and abs(value) > MAX_EXACT and int(Decimal(repr(float(value)))) != value:
        raise InvalidGrammarError(
            f"the value {_show(Decimal(value))} is not possible: integers beyond 2^53 are not written exactly"
        )


def _is_integer(schema: Schema) -> bool:
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return "integer" in types and "number" not in types


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def _decimal(value: float) -> Decimal:
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def _show(value: Decimal) -> str:
    text = f"{value:f}"
    return text if len(text) <= 40 else f"{value:.6e}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
