"""Numbers of JSON schemas. The grammar library holds them as float64 and 64-bit integers, and it keeps some
ranges wrongly. Bounds that it cannot hold are moved inwards, so that every number that is generated is valid;
values that it cannot write are refused."""

import math
from decimal import Decimal
from typing import Any

from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.subschemas import Schema

# The library writes no integers of 19 digits where a range has only the bound that is nearer to 0.
MAX_BOUND, MAX_INNER_BOUND = 9_200_000_000_000_000_000, 10**18 - 1
MAX_EXACT = 2**53
# Distance from an exclusive bound at which a range begins where the library would let the bound in.
INWARDS = Decimal("1e-9")
LOWER, UPPER = "minimum", "maximum"
_EXCLUSIVE = {LOWER: "exclusiveMinimum", UPPER: "exclusiveMaximum"}


def make_exact(schema: Schema) -> None:
    """Change the bounds of a schema's own numbers. Raises InvalidGrammarError for what is not possible."""
    for value in [schema.get("const"), *_list(schema.get("enum"))]:
        _check_value(value)
    lower, upper = _bound(schema, LOWER), _bound(schema, UPPER)
    if lower is None and upper is None:
        return
    if _is_integer(schema):
        lower, upper = _to_integers(lower, upper)
    else:
        lower, upper = _keep_out(lower, upper)
    for key in (LOWER, UPPER, *_EXCLUSIVE.values()):
        schema.pop(key, None)
    for key, bound in ((LOWER, lower), (UPPER, upper)):
        if bound is not None:
            value, is_exclusive = bound
            schema[_EXCLUSIVE[key] if is_exclusive else key] = _hold(value, key)


Bound = tuple[Decimal, bool]
"""A bound, and whether it is exclusive."""


def _bound(schema: Schema, key: str) -> Bound | None:
    """Return the tighter one of an inclusive and an exclusive bound."""
    found = [
        (_decimal(schema[name]), is_exclusive)
        for name, is_exclusive in ((key, False), (_EXCLUSIVE[key], True))
        if _is_number(schema.get(name))
    ]
    if not found:
        return None
    sign = 1 if key == LOWER else -1
    return max(found, key=lambda bound: (sign * bound[0], bound[1]))


def _to_integers(lower: Bound | None, upper: Bound | None) -> tuple[Bound | None, Bound | None]:
    """Return inclusive bounds of integers."""
    if lower is not None:
        value, is_exclusive = lower
        lower = Decimal(math.floor(value) + 1 if is_exclusive else math.ceil(value)), False
    if upper is not None:
        value, is_exclusive = upper
        upper = Decimal(math.ceil(value) - 1 if is_exclusive else math.floor(value)), False
    return lower, upper


def _keep_out(lower: Bound | None, upper: Bound | None) -> tuple[Bound | None, Bound | None]:
    """Return bounds of which the library lets no exclusive one in.

    It does if an exclusive bound is an integer, and the other bound has the same integer part."""
    if lower is None or upper is None or lower[0] >= upper[0]:
        return lower, upper
    if lower[1] and _is_whole(lower[0]) and math.trunc(upper[0]) == lower[0]:
        lower = lower[0] + INWARDS, False
    if upper[1] and _is_whole(upper[0]) and math.trunc(lower[0]) == upper[0]:
        upper = upper[0] - INWARDS, False
    return lower, upper


def _hold(value: Decimal, key: str) -> int | float:
    """Return the bound that the library can hold and that is no wider. Raises InvalidGrammarError."""
    sign = 1 if key == LOWER else -1  # of the direction inwards
    value = max(sign * value, Decimal(-MAX_BOUND)) * sign
    if not _is_whole(value):
        return float(value)
    held = int(value)
    if abs(held) > MAX_EXACT:
        held = int(float(held))
        while sign * held < sign * value:
            held = int(math.nextafter(float(held), sign * math.inf))
    if sign * held > MAX_INNER_BOUND:
        raise InvalidGrammarError(
            f"{key} {_show(value)} is not possible: numbers of more than 18 digits cannot be required"
        )
    return held


def _check_value(value: Any) -> None:
    """Raise InvalidGrammarError for an integer of which the library would write other digits."""
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
