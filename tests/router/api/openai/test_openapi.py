"""Tests that the OpenAPI document describes every route and contains everything that it refers to."""

import re
from typing import Any, cast

from tests.support.router.served_http import LIMITS_OF_HTTP
from tgis.config.processes import RouterConfig
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.models import Models
from tgis.router.api.openai.chat_api import OpenAiChatApi
from tgis.router.api.openai.openapi import ERRORS, OPERATIONS, OpenApiRoute
from tgis.router.api.openai.routes import NOT_SERVED, openai_api

OWN = OpenApiRoute([(operation, ERRORS) for operation in OPERATIONS])
STATUSES = {"200", "400", "401", "403", "404", "413", "415", "429", "500", "503"}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_route_is_there() -> None:
    unused: Any = None
    config, models = RouterConfig(tokenizer_path=""), Models(("a",))
    given = (unused, unused, models, unused, LIMITS_OF_HTTP, unused, unused, config, lambda: True)
    parts = ServiceParts(*given, load=unused, watching=unused)
    routes = {
        (re.sub(":path", "", route.path), method)
        for route in openai_api(parts, OpenAiChatApi(parts)).routes
        if route.path not in (*NOT_SERVED, "/openapi.json")
        for method in cast("set[str]", route.methods) - {"HEAD"}
    }
    paths = OWN.document["paths"]
    assert {(path, method.upper()) for path, item in paths.items() for method in item} == routes


def test_the_document_is_whole() -> None:
    document = OWN.document
    schemas = document["components"]["schemas"]
    assert references(document) == {f"#/components/schemas/{name}" for name in schemas}
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    operations = [one for item in document["paths"].values() for one in item.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    for one in operations:
        assert one["responses"].keys() >= STATUSES, one["operationId"]
        assert all("retry-after" in one["responses"][status]["headers"] for status in ("429", "503"))
