"""Serves `/tokenize` and `/chat_tokenize`."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.errors import HttpError
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.tgi.errors import TemplateError
from tgis.router.api.tgi.fields.bodies import decode, read_json
from tgis.router.api.tgi.rules import TGI
from tgis.router.api.tgi.types import GenerateRequest
from tgis.router.text.token_lists import list_chat_places, list_places
from tgis.router.text.tokenization import TokenizeJob

_decoder = msgspec.json.Decoder(GenerateRequest)


class Tokenization:
    def __init__(self, parts: ServiceParts, chats: ChatApi) -> None:
        self._parts = parts
        self._chats = chats
        self._chat_decoder = msgspec.json.Decoder(chats.request_type)

    async def tokenize(self, request: Request) -> Response:
        body = decode(_decoder, await read_json(request))
        max_tokens = body.parameters.truncate if body.parameters is not None else None
        arguments = (body.inputs, max_tokens or 0)
        return await self._run(TokenizeJob(list_places, arguments, 1, _size(body.inputs)), request)

    async def tokenize_chat(self, request: Request) -> Response:
        body = decode(self._chat_decoder, await read_json(request))
        try:
            text = await self._chats.render(body, request.state.call)
        except HttpError as error:
            raise TemplateError(f"Template error: {error}", error.log_text) from None
        job = TokenizeJob(list_chat_places, (text,), 1, _size(text), "ChatTokenize")
        return await self._run(job, request)

    async def _run(self, job: TokenizeJob, request: Request) -> Response:
        http = request.state.call
        answer = await self._parts.service.tokenize(job, TGI, http.metadata, http.connection)
        return Response(answer, media_type="application/json")


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))
