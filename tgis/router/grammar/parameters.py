"""Reads the parameters of a function from the JSON schema of its arguments."""

import json
from typing import Any, NamedTuple

_DEFINITIONS = ("$defs", "definitions")


class FunctionParameter(NamedTuple):
    name: str
    schema: str
    is_text: bool
    """True if all values are texts."""
    choices: tuple[str, ...]
    """All values of a text with few values; otherwise empty."""
    is_required: bool


def read_parameters(schema_text: str) -> list[FunctionParameter]:
    """Return the parameters that the schema names."""
    schema = json.loads(schema_text)
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    names = required if isinstance(required, list) else []
    return [_read(name, part, shared, name in names) for name, part in properties.items()]


def allows_any(schema_text: str) -> bool:
    """Return True if the schema names no parameters and forbids none."""
    schema = json.loads(schema_text)
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _read(name: str, part: Any, shared: dict[str, Any], is_required: bool) -> FunctionParameter:
    if not isinstance(part, dict):  # true, which allows any value
        return FunctionParameter(name, "{}", False, (), is_required)
    values = [part["const"]] if "const" in part else part.get("enum")
    is_choice = isinstance(values, list) and bool(values) and all(isinstance(each, str) for each in values)
    return FunctionParameter(
        name,
        json.dumps(part | shared),
        is_choice or part.get("type") == "string",
        tuple(values) if is_choice and values else (),
        is_required,
    )
