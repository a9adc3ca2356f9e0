"""Routes of LMI's API."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgis.config.processes import RouterConfig
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.lmi.errors import LmiErrors
from tgis.router.api.lmi.handler import Invocations
from tgis.router.api.openai.service_parts import OpenAiApi
from tgis.router.requests.doors import LMI


class PingAnswer(msgspec.Struct):
    status: str


def lmi_api(api: OpenAiApi, is_ready: Callable[[], bool], config: RouterConfig) -> HttpApi:
    errors = LmiErrors(api.models.names[0])
    invocations = Invocations(api, errors, config.lmi_output_formatter)
    routes = [
        Route("/invocations", invocations.invoke, methods=["POST"]),
        Route("/predictions/{model:path}", invocations.predict, methods=["POST"]),
        Route("/models/{model:path}/invoke", invocations.predict, methods=["POST"]),
    ]

    async def ping(request: Request) -> Response:
        health = PingAnswer("Healthy" if is_ready() else "Unhealthy")
        return Response(
            msgspec.json.encode(health), 200 if is_ready() else 503, media_type="application/json"
        )

    return HttpApi(LMI, routes, errors, [Route("/ping", ping)])
