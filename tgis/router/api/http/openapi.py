"""The OpenAPI document, which follows from the types of requests and answers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from tgis import __version__

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
RETRY_AFTER = {"retry-after": {"description": "Seconds to wait before.", "schema": {"type": "integer"}}}
TEMPORARY = ("429", "503")
ANY_TEXT = {"schema": {"type": "string"}}

Json = dict[str, Any]
Refs = Mapping[Any, Json]


class ErrorTexts(NamedTuple):
    """Errors of an API for the document."""

    kind: Any
    """Type of those that are JSON."""
    texts: Mapping[str, str]
    """Descriptions by status."""
    plain: tuple[str, ...] = ("431",)
    """Statuses of those that are plain text."""
    empty: tuple[str, ...] = ()


class Operation(NamedTuple):
    path: str
    summary: str
    answers: tuple[Any, ...]
    """Types of the answer, of which it is one; none if it is a stream."""
    bodies: tuple[Any, ...] = ()
    """Types of the body, likewise; a request without one is a GET."""
    has_stream: bool = False
    is_text: bool = False


def openapi_document(operations: Iterable[tuple[Operation, ErrorTexts]]) -> Json:
    """Return the document of operations, each with its API's errors. Those that share a path are one."""
    by_path: dict[str, tuple[Operation, ErrorTexts]] = {}
    for operation, errors in operations:
        known, known_errors = by_path.get(operation.path, (operation, errors))
        by_path[operation.path] = _joined(known, operation), known_errors
    types = list(dict.fromkeys(kind for one, errors in by_path.values() for kind in _types(one, errors)))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Text generation", "version": __version__},
        "paths": {path: _path_item(one, errors, refs) for path, (one, errors) in by_path.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _joined(one: Operation, other: Operation) -> Operation:
    if one is other:
        return one
    return one._replace(answers=one.answers + other.answers, bodies=one.bodies + other.bodies)


def _types(operation: Operation, errors: ErrorTexts) -> tuple[Any, ...]:
    return (*operation.answers, *operation.bodies, errors.kind)


def _path_item(operation: Operation, errors: ErrorTexts, refs: Refs) -> Json:
    answer: Json = {}
    if operation.answers:
        answer[TEXT if operation.is_text else JSON] = _one_of(operation.answers, refs)
    if operation.has_stream:
        answer[EVENTS] = ANY_TEXT
    item: Json = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").replace("{name}", "name") or "root",
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            **dict(_errors(errors, refs)),
        },
    }
    if "{name}" in operation.path:
        item["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if not operation.bodies:
        return {"get": item}
    item["requestBody"] = {"required": True, "content": {JSON: _one_of(operation.bodies, refs)}}
    return {"post": item}


def _errors(errors: ErrorTexts, refs: Refs) -> Iterator[tuple[str, Json]]:
    for status, text in errors.texts.items():
        told: Json = {"description": text}
        if status not in errors.empty:
            is_plain = status in errors.plain
            told["content"] = {TEXT: ANY_TEXT} if is_plain else {JSON: {"schema": refs[errors.kind]}}
        if status in TEMPORARY:
            told["headers"] = RETRY_AFTER
        yield status, told


def _one_of(types: tuple[Any, ...], refs: Refs) -> Json:
    if len(types) == 1:
        return {"schema": refs[types[0]]}
    return {"schema": {"anyOf": [refs[kind] for kind in types]}}
