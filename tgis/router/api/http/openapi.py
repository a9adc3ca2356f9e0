"""Builds the OpenAPI document from the types of requests and answers."""

from collections.abc import Iterable, Mapping
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
    """Errors of an API in the document."""

    kind: Any
    """Type of JSON errors."""
    texts: Mapping[str, str]
    """Descriptions by status."""
    plain: tuple[str, ...] = ("431",)
    """Statuses of errors in plain text."""
    mixed: tuple[str, ...] = ()
    """Statuses of errors in plain text or JSON."""
    empty: tuple[str, ...] = ()


class Operation(NamedTuple):
    path: str
    summary: str
    answers: tuple[Any, ...]
    """Alternative types of the answer; empty if every answer is a stream."""
    bodies: tuple[Any, ...] = ()
    """Alternative types of the body; a request without a body is a GET."""
    has_stream: bool = False
    is_text: bool = False

    @property
    def method(self) -> str:
        return "post" if self.bodies else "get"


def openapi_document(operations: Iterable[tuple[Operation, ErrorTexts]]) -> Json:
    """Return the document of operations with their APIs' errors. Operations on the same route are joined."""
    by_route: dict[tuple[str, str], tuple[Operation, tuple[ErrorTexts, ...]]] = {}
    for operation, errors in operations:
        route = operation.path, operation.method
        known, known_errors = by_route.get(route, (operation, ()))
        by_route[route] = _joined(known, operation), (*known_errors, errors)
    types = list(dict.fromkeys(kind for one, errors in by_route.values() for kind in _types(one, errors)))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = dict(zip(types, schemas, strict=True))
    paths: Json = {}
    for (path, method), (one, all_errors) in by_route.items():
        paths.setdefault(path, {})[method] = _describe(one, all_errors, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Text generation", "version": __version__},
        "paths": paths,
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


def _types(operation: Operation, errors: Iterable[ErrorTexts]) -> tuple[Any, ...]:
    return (*operation.answers, *operation.bodies, *(each.kind for each in errors))


def _describe(operation: Operation, errors: Iterable[ErrorTexts], refs: Refs) -> Json:
    answer: Json = {}
    if operation.answers:
        answer[TEXT if operation.is_text else JSON] = _one_of([refs[kind] for kind in operation.answers])
    if operation.has_stream:
        answer[EVENTS] = {}
    name = operation.path.strip("/").replace("/", "_").replace("{name}", "name")
    item: Json = {
        "summary": operation.summary,
        "operationId": name or f"{operation.method}_root",
        "responses": {"200": {"description": "The answer.", "content": answer}, **_errors(errors, refs)},
    }
    if "{name}" in operation.path:
        item["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.bodies:
        body = _one_of([refs[kind] for kind in operation.bodies])
        item["requestBody"] = {"required": True, "content": {JSON: body}}
    return item


def _errors(errors: Iterable[ErrorTexts], refs: Refs) -> Json:
    """Return the errors of all APIs with the same route, by status."""
    described: Json = {}
    objects: dict[str, list[Json]] = {}
    for api in errors:
        for status, text in api.texts.items():
            one = described.setdefault(status, {"description": text})
            if status in TEMPORARY:
                one["headers"] = RETRY_AFTER
            if status in (*api.plain, *api.mixed):
                one.setdefault("content", {})[TEXT] = ANY_TEXT
            if status not in (*api.plain, *api.empty):
                objects.setdefault(status, []).append(refs[api.kind])
    for status, schemas in objects.items():
        described[status].setdefault("content", {})[JSON] = _one_of(schemas)
    return described


def _one_of(schemas: list[Json]) -> Json:
    return {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
