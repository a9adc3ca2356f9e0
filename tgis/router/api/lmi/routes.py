"""Builds the routes of LMI's API."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.lmi.errors import LmiErrors
from tgis.router.api.lmi.handler import Invocations
from tgis.router.api.lmi.rules import LMI


class PingAnswer(msgspec.Struct):
    status: str


def lmi_api(parts: ServiceParts, chats: ChatApi) -> HttpApi:
    errors = LmiErrors(parts.models.names[0])
    invocations = Invocations(parts, chats, errors, parts.config.lmi_output_formatter)
    routes = [
        Route("/invocations", invocations.invoke, methods=["POST"]),
        Route("/predictions/{model:path}", invocations.predict, methods=["POST"]),
        Route("/models/{model:path}/invoke", invocations.predict, methods=["POST"]),
    ]

    async def ping(request: Request) -> Response:
        is_ready = parts.is_ready()
        body = msgspec.json.encode(PingAnswer("Healthy" if is_ready else "Unhealthy"))
        return Response(body, 200 if is_ready else 503, media_type="application/json")

    return HttpApi(LMI, routes, errors, [Route("/ping", ping)])
