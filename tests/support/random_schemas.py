"""Random JSON schemas, each with an independent validator."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Schema(NamedTuple):
    schema: dict[str, Any]
    fits: Callable[[Any], bool]


def random_object(r: random.Random, depth: int = 3) -> Schema:
    """Return an object schema with properties that may be required, and no others."""
    names = r.sample(["a", "b", 'quote"', "é", "two words", "$ref"], r.randint(0, 4))
    parts = {name: random_schema(r, depth - 1) for name in names}
    required = [name for name in names if r.random() < 0.6]
    schema = {
        "type": "object",
        "properties": {name: part.schema for name, part in parts.items()},
        "required": required,
        "additionalProperties": False,
    }
    return Schema(
        schema,
        lambda value: (
            isinstance(value, dict)
            and {*required} <= {*value} <= {*names}
            and all(parts[name].fits(each) for name, each in value.items())
        ),
    )


def random_schema(r: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_integer, _string, _enum, _boolean]
    return r.choice([*kinds, random_object, _array, _either] if depth > 0 else kinds)(r, depth)


def _integer(r: random.Random, _: int) -> Schema:
    low = r.randint(-300, 300)
    high = low + r.randint(0, 500)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Schema(schema, lambda value: type(value) is int and low <= value <= high)


def _string(r: random.Random, _: int) -> Schema:
    low = r.randint(0, 3)
    high = low + r.randint(0, 5)
    schema = {"type": "string", "minLength": low, "maxLength": high}
    return Schema(schema, lambda value: isinstance(value, str) and low <= len(value) <= high)


def _enum(r: random.Random, _: int) -> Schema:
    values = r.sample([1, "one", None, "</call>", [], {"x": [1]}, -2, "é\n"], r.randint(1, 4))
    return Schema({"enum": values}, lambda value: any(_equal(value, each) for each in values))


def _boolean(r: random.Random, _: int) -> Schema:
    return Schema({"type": "boolean"}, lambda value: isinstance(value, bool))


def _array(r: random.Random, depth: int) -> Schema:
    part, low = random_schema(r, depth - 1), r.randint(0, 2)
    high = low + r.randint(0, 2)
    schema = {"type": "array", "items": part.schema, "minItems": low, "maxItems": high}
    return Schema(
        schema,
        lambda value: isinstance(value, list) and low <= len(value) <= high and all(map(part.fits, value)),
    )


def _either(r: random.Random, depth: int) -> Schema:
    parts = [random_schema(r, depth - 1) for _ in range(2)]
    return Schema(
        {"anyOf": [part.schema for part in parts]}, lambda value: any(part.fits(value) for part in parts)
    )


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other
