"""Routes of OpenAI's API."""

from starlette.routing import Route

from tgis.router.api.http.openai.completions import Completions
from tgis.router.api.http.openai.service_parts import OpenAiApi


def openai_routes(api: OpenAiApi) -> list[Route]:
    return [Route("/v1/completions", Completions(api).answer, methods=["POST"])]
