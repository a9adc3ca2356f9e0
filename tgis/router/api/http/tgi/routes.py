"""Routes of TGI's API."""

from collections.abc import Callable

from starlette.routing import Route

from tgis.config.processes import RouterConfig
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.openai.service_parts import OpenAiApi
from tgis.router.api.http.tgi.bodies import has_inputs
from tgis.router.api.http.tgi.errors import TGI_ERRORS
from tgis.router.api.http.tgi.handler import Generation
from tgis.router.api.http.tgi.probes import Probes
from tgis.router.api.http.tgi.tokenize import Tokenization
from tgis.router.requests.doors import TGI


def tgi_api(api: OpenAiApi, is_ready: Callable[[], bool], config: RouterConfig) -> HttpApi:
    generation, tokenization = Generation(api, config.compute_type or "cpu"), Tokenization(api)
    probes = Probes(api, is_ready, config)
    routes = [
        Route("/generate", generation.generate, methods=["POST"]),
        Route("/generate_stream", generation.stream, methods=["POST"]),
        Route("/", generation.generate_any, methods=["POST"]),
        Route("/invocations", generation.invoke, methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/chat_tokenize", tokenization.tokenize_chat, methods=["POST"]),
    ]
    return HttpApi(
        TGI,
        routes,
        TGI_ERRORS,
        probes=[
            Route("/info", probes.info),
            *(Route(path, probes.health) for path in ("/", "/health", "/ping")),
        ],
        claims=has_inputs,
    )
