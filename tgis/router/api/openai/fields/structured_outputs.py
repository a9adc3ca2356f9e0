"""Reads the constraint of a text: `response_format`, `structured_outputs` and the older `guided_*`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tgis.router.api.openai.errors import ApiError
from tgis.router.api.openai.fields.sampling_fields import SamplingFields
from tgis.router.grammar.compiler import JSON, Guided

GUIDED = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}
UNSUPPORTED = ("structural_tag",)


class Statement(NamedTuple):
    """Constraint, and the field of the request that states it."""

    param: str
    guided: Guided | None
    """None if the field asks for free text."""


def read_guided(fields: SamplingFields) -> Guided | None:
    """Return the request's constraint. Raises ApiError if it is malformed or if there are several."""
    return _read_statement(fields).guided


def constraint_names(fields: SamplingFields) -> dict[str, str]:
    """Return the field that states the request's constraint, by the constraint's name in the service. Empty
    if the request has no constraint."""
    param, guided = _read_statement(fields)
    return {} if guided is None else {guided.field: param}


def _read_statement(fields: SamplingFields) -> Statement:
    stated = [each for each in _statements(fields) if each.guided is not None]
    if len(stated) > 1:
        names = ", ".join(each.param for each in stated)
        raise ApiError(400, f"only one of {names} may be given", stated[1].param)
    return stated[0] if stated else Statement("", None)


def _statements(fields: SamplingFields) -> Iterator[Statement]:
    if fields.response_format is not None:
        yield Statement("response_format", _response_format(fields.response_format))
    yield from _structured_outputs(fields.structured_outputs)
    for kind, name in GUIDED.items():
        yield Statement(name, _guided(name, kind, getattr(fields, name)))


def _response_format(value: Any) -> Guided | None:
    param = "response_format"
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "value": dict(schema)}:  # huggingface_hub's form of a schema
            return Guided("json_schema", _encode(schema))
        case {"type": "json_object"}:
            return Guided("format", JSON)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Guided("json_schema", _encode(schema))
        case {"type": "json_schema"}:
            raise ApiError(400, f"{param}: json_schema must be an object with a schema", param)
        case _:
            raise ApiError(400, f"{param}: type must be text, json_object or json_schema", param)


def _structured_outputs(value: Any) -> Iterator[Statement]:
    param = "structured_outputs"
    if value is None:
        return
    if not isinstance(value, dict):
        raise ApiError(400, f"{param} must be an object", param)
    for name in UNSUPPORTED:
        if value.get(name) is not None:
            raise ApiError(400, f"{param}: {name} is not supported", param)
    if value.get("json_object"):
        yield Statement(f"{param}.json_object", Guided("format", JSON))
    for kind in GUIDED:
        yield Statement(f"{param}.{kind}", _guided(f"{param}.{kind}", kind, value.get(kind)))


def _guided(param: str, kind: str, value: Any) -> Guided | None:
    if value is None:
        return None
    match kind, value:
        case "json", dict() | str():
            return Guided("json_schema", value if isinstance(value, str) else _encode(value))
        case "choice", [str(), *_] if all(isinstance(each, str) for each in value):
            # The compiler needs at least two choices.
            return Guided("choice", choices=tuple(value if len(value) > 1 else value * 2))
        case (("regex" | "grammar"), str()) if value:
            return Guided(kind, value)
    wanted = {"json": "an object or its JSON", "choice": "a list of strings, at least one"}.get(
        kind, "a string that is not empty"
    )
    raise ApiError(400, f"{param} must be {wanted}", param)


def _encode(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()
