"""Lists the operations of OpenAI's API, and serves the OpenAPI document of all served APIs."""

from collections.abc import Sequence
from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.openapi import ErrorTexts, Json, Operation, openapi_document
from tgis.router.api.openai.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from tgis.router.api.openai.chat.types import ChatCompletion, ChatRequest
from tgis.router.api.openai.completions.types import Completion, CompletionRequest
from tgis.router.api.openai.errors import ErrorBody
from tgis.router.api.openai.model_routes import ModelCard, ModelList
from tgis.router.api.openai.tokenize import DetokenizeBody, TokenizeBody, Version
from tgis.router.text.token_lists import TokenList, TokenText

PATH = "/openapi.json"
ERRORS = ErrorTexts(
    ErrorBody,
    {
        "400": "The request is wrong.",
        "401": "A valid bearer token is required.",
        "403": "A page of another origin has sent the request.",
        "404": "The model or the route does not exist.",
        "413": "The body is too large.",
        "415": "The body is not declared as JSON.",
        "429": "No room now; try again.",
        "431": "The headers are too large.",
        "500": "The service failed.",
        "503": "The service loads, shuts down, has lost its model or has too many connections.",
    },
)
OPERATIONS = (
    Operation("/v1/chat/completions", "Answer a chat", (ChatCompletion,), (ChatRequest,), True),
    Operation("/v1/completions", "Continue prompts", (Completion,), (CompletionRequest,), True),
    Operation("/v1/models", "List models", (ModelList,)),
    Operation("/v1/models/{name}", "Describe a model", (ModelCard,)),
    Operation("/v1/load_lora_adapter", "Name a LoRA adapter", (str,), (LoadAdapterBody,), is_text=True),
    Operation("/v1/unload_lora_adapter", "Take a name away", (str,), (UnloadAdapterBody,), is_text=True),
    Operation("/tokenize", "Turn a text or a chat into tokens", (TokenList,), (TokenizeBody,)),
    Operation("/detokenize", "Turn tokens into text", (TokenText,), (DetokenizeBody,)),
    Operation("/version", "Tell the version", (Version,)),
)


class OpenApiRoute:
    def __init__(self, operations: Sequence[tuple[Operation, ErrorTexts]]) -> None:
        """Take the operations of all served APIs. The list may grow until the first request."""
        self._operations = operations

    @cached_property
    def document(self) -> Json:
        return openapi_document(self._operations)

    @cached_property
    def _body(self) -> bytes:
        return msgspec.json.encode(self.document)

    async def serve(self, request: Request) -> Response:
        return Response(self._body, media_type="application/json")
