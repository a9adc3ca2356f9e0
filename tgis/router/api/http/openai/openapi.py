"""The OpenAPI document, which follows from the types of requests and answers."""

from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis import __version__
from tgis.router.api.http.openai.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from tgis.router.api.http.openai.chat.types import ChatCompletion, ChatRequest
from tgis.router.api.http.openai.completions.types import Completion, CompletionRequest
from tgis.router.api.http.openai.errors import ErrorBody
from tgis.router.api.http.openai.models import ModelCard, ModelList
from tgis.router.api.http.openai.tokenize import DetokenizeBody, TokenizeBody, Version
from tgis.router.text.token_lists import TokenList, TokenText

PATH = "/openapi.json"
ERRORS = {
    "400": "The request is wrong.",
    "401": "A valid bearer token is required.",
    "404": "The model or the route does not exist.",
    "413": "The body is too large.",
    "429": "No room now; try again.",
    "431": "The headers are too large.",
    "500": "The service failed.",
    "503": "The service loads, shuts down, has lost its model or has too many connections.",
}
RETRY_AFTER = {"retry-after": {"description": "Seconds to wait before.", "schema": {"type": "integer"}}}


class Operation(NamedTuple):
    path: str
    summary: str
    answer: Any
    body: Any = None
    has_stream: bool = False
    is_text: bool = False


OPERATIONS = (
    Operation("/v1/chat/completions", "Answer a chat", ChatCompletion, ChatRequest, True),
    Operation("/v1/completions", "Continue prompts", Completion, CompletionRequest, True),
    Operation("/v1/models", "List models", ModelList),
    Operation("/v1/models/{name}", "Describe a model", ModelCard),
    Operation("/v1/load_lora_adapter", "Name a LoRA adapter", str, LoadAdapterBody, is_text=True),
    Operation("/v1/unload_lora_adapter", "Take a name away", str, UnloadAdapterBody, is_text=True),
    Operation("/tokenize", "Turn a text or a chat into tokens", TokenList, TokenizeBody),
    Operation("/detokenize", "Turn tokens into text", TokenText, DetokenizeBody),
    Operation("/version", "Tell the version", Version),
)


def openapi_document() -> dict[str, Any]:
    types = [kind for each in OPERATIONS for kind in (each.answer, each.body) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip([*types, ErrorBody], schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Text generation", "version": __version__},
        "paths": {each.path: _path_item(each, refs) for each in OPERATIONS},
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


async def serve_openapi(request: Request) -> Response:
    return Response(_DOCUMENT, media_type="application/json")


def _path_item(operation: Operation, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    kind = "text/plain" if operation.is_text else "application/json"
    answer = {kind: {"schema": refs[operation.answer]}}
    if operation.has_stream:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": refs[ErrorBody]}}
    item: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").replace("{name}", "name"),
        "responses": {"200": {"description": "The answer.", "content": answer}}
        | {status: {"description": text, "content": error} for status, text in ERRORS.items()},
    }
    for status in ("429", "503"):
        item["responses"][status]["headers"] = RETRY_AFTER
    item["responses"]["431"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if "{name}" in operation.path:
        item["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is None:
        return {"get": item}
    content = {"application/json": {"schema": refs[operation.body]}}
    item["requestBody"] = {"required": True, "content": content}
    return {"post": item}


_DOCUMENT = msgspec.json.encode(openapi_document())
