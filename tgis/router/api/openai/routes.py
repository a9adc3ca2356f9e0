"""Routes of OpenAI's API."""

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.openai.adapter_routes import AdapterRoutes
from tgis.router.api.openai.chat.handler import ChatCompletions
from tgis.router.api.openai.completions.handler import Completions
from tgis.router.api.openai.errors import OPENAI_ERRORS, ApiError
from tgis.router.api.openai.openapi import PATH, OpenApiRoute
from tgis.router.api.openai.service_parts import OpenAiApi
from tgis.router.api.openai.tokenize import TokenRoutes
from tgis.router.requests.doors import OPENAI

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


def openai_api(api: OpenAiApi, others: Iterable[HttpApi] = ()) -> HttpApi:
    """Return the API, whose OpenAPI document has the operations of others that are served too."""
    document = OpenApiRoute(told for other in others for told in other.operations)
    return HttpApi(OPENAI, _routes(api, document), OPENAI_ERRORS, prefix="/v1/")


def _routes(api: OpenAiApi, document: OpenApiRoute) -> list[Route]:
    tokens, adapters = TokenRoutes(api), AdapterRoutes(api)
    return [
        Route("/v1/chat/completions", ChatCompletions(api).answer, methods=["POST"]),
        Route("/v1/completions", Completions(api).answer, methods=["POST"]),
        Route("/v1/models", api.models.list),
        Route("/v1/models/{name:path}", api.models.retrieve),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/version", tokens.version),
        Route(PATH, document.serve),
        *(Route(path, _refuse, methods=METHODS) for path in NOT_SERVED),
    ]


async def _refuse(request: Request) -> Response:
    text = f"{request.url.path[:64]} is not served; /v1/chat/completions and /v1/completions are"
    raise ApiError(404, text, code="not_found")
