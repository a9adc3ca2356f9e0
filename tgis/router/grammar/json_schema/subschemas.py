"""Iterates over the subschemas of a JSON schema, but not over objects that are data."""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

# Keywords whose values are a schema, a list of schemas, or schemas by name.
_ONE = (
    *("items", "additionalItems", "contains", "unevaluatedItems", "additionalProperties"),
    *("unevaluatedProperties", "propertyNames", "not", "if", "then", "else", "contentSchema"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def list_subschemas(schema: Any) -> Iterator[Schema]:
    """Yield the schema and all its subschemas that are objects, outer ones first. Callers may modify them."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending.extend(_parts(part))


def _parts(schema: Schema) -> Iterator[Any]:
    for key in _ONE:
        yield schema.get(key)
    for key in _LISTS:
        if isinstance(value := schema.get(key), list):
            yield from value
    for key in _MAPS:
        if isinstance(value := schema.get(key), dict):
            yield from value.values()
