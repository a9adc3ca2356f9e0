"""Builds the routes of TGI's API."""

from typing import Any

from starlette.routing import Route

from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.openapi import ErrorTexts, Operation
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.tgi.errors import TGI_ERRORS, TgiErrorBody
from tgis.router.api.tgi.fields.bodies import has_inputs
from tgis.router.api.tgi.handler import Generation
from tgis.router.api.tgi.probes import Info, Probes
from tgis.router.api.tgi.rules import TGI
from tgis.router.api.tgi.tokenize import Tokenization
from tgis.router.api.tgi.types import GenerateAnswer, GenerateRequest
from tgis.router.text.token_lists import ChatPlaces, TokenPlace

ERRORS = ErrorTexts(
    TgiErrorBody,
    {
        "400": "The body is not JSON.",
        "401": "A valid bearer token is required.",
        "403": "A page of another origin has sent the request.",
        "404": "The adapter or the route does not exist.",
        "413": "The body is too large.",
        "415": "The body is not declared as JSON.",
        "422": "A field is wrong; plain text if it has another type.",
        "424": "The service failed.",
        "429": "No room now; try again.",
        "431": "The headers are too large.",
        "503": "The service loads, shuts down, has lost its model or has too many connections.",
    },
    plain=("400", "413", "415", "431"),
    mixed=("422",),
    empty=("401",),
)


def tgi_api(parts: ServiceParts, chats: ChatApi) -> HttpApi:
    generation, tokenization = Generation(parts, chats), Tokenization(parts, chats)
    probes = Probes(parts)
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
        operations=[(operation, ERRORS) for operation in _operations(chats.request_type)],
    )


def _operations(chat_request: type[Any]) -> tuple[Operation, ...]:
    body = (GenerateRequest,)
    tokens = (list[TokenPlace],)
    return (
        Operation("/generate", "Continue a text", (GenerateAnswer,), body),
        Operation("/generate_stream", "Continue a text in events", (), body, True),
        Operation("/", "Continue a text, in events or not", (list[GenerateAnswer],), body, True),
        Operation("/tokenize", "Turn a text into tokens and places", tokens, body),
        Operation("/chat_tokenize", "Turn a chat into tokens and places", (ChatPlaces,), (chat_request,)),
        Operation("/", "Tell if the service is ready", ()),
        Operation("/info", "Tell the model and the limits", (Info,)),
    )
