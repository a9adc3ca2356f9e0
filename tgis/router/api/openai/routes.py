"""Builds the routes of OpenAI's API."""

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.openai.adapter_routes import AdapterRoutes
from tgis.router.api.openai.errors import OPENAI_ERRORS, ApiError
from tgis.router.api.openai.model_routes import ModelRoutes
from tgis.router.api.openai.openapi import ERRORS, OPERATIONS, PATH, OpenApiRoute
from tgis.router.api.openai.pages import page_routes
from tgis.router.api.openai.rules import OPENAI
from tgis.router.api.openai.tokenize import TokenRoutes

NOT_SERVED = (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/audio/{rest:path}",
    "/v1/images/{rest:path}",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning/{rest:path}",
)
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def openai_api(parts: ServiceParts, chats: ChatApi) -> HttpApi:
    return HttpApi(
        OPENAI,
        _routes(parts, chats),
        OPENAI_ERRORS,
        prefix="/v1/",
        operations=[(operation, ERRORS) for operation in OPERATIONS],
        pages=partial(page_routes, parts.config),
    )


def _routes(parts: ServiceParts, chats: ChatApi) -> list[Route]:
    tokens = TokenRoutes(parts)
    adapters = AdapterRoutes(parts)
    models = _models(parts, chats)
    return [
        Route("/v1/chat/completions", chats.answer_chat, methods=["POST"]),
        Route("/v1/completions", chats.answer_completion, methods=["POST"]),
        Route("/v1/models", models.list_models),
        Route("/v1/models/{name:path}", models.retrieve),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/version", tokens.version),
        Route(PATH, OpenApiRoute(parts.operations).serve),
        *(Route(path, _refuse, methods=METHODS) for path in NOT_SERVED),
    ]


def _models(parts: ServiceParts, chats: ChatApi) -> ModelRoutes:
    created = int(Path(parts.config.tokenizer_path).stat().st_mtime)
    return ModelRoutes(parts.models, parts.limits.max_sequence_length, created, chats.default_sampling)


async def _refuse(request: Request) -> Response:
    text = f"{request.url.path[:64]} is not served; /v1/chat/completions and /v1/completions are"
    raise ApiError(404, text, code="not_found", log_text="this route of the API is not served")
