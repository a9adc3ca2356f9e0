"""`/v1/completions`."""

from starlette.types import Receive, Scope, Send

from tgis.router.api.http.openai.errors import ApiError, respond
from tgis.router.api.http.openai.service_parts import OpenAiApi


class Completions:
    def __init__(self, api: OpenAiApi) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(ApiError(503, "completions are not served yet"))(scope, receive, send)
