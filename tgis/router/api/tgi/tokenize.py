"""`/tokenize` and `/chat_tokenize`."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.openai.chat.messages import render_chat
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.errors import ApiError
from tgis.router.api.openai.service_parts import OpenAiApi
from tgis.router.api.tgi.bodies import decode, read_json
from tgis.router.api.tgi.errors import TemplateError
from tgis.router.api.tgi.types import GenerateRequest
from tgis.router.requests.doors import TGI
from tgis.router.text.token_lists import list_chat_places, list_places
from tgis.router.text.tokenization import TokenizeJob

_decoder = msgspec.json.Decoder(GenerateRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


class Tokenization:
    def __init__(self, api: OpenAiApi) -> None:
        self._api = api

    async def tokenize(self, request: Request) -> Response:
        body = decode(_decoder, await read_json(request))
        most = body.parameters.truncate if body.parameters is not None else None
        arguments = (body.inputs, most or 0)
        return await self._run(TokenizeJob(list_places, arguments, 1, _size(body.inputs)), request)

    async def tokenize_chat(self, request: Request) -> Response:
        body = decode(_chat_decoder, await read_json(request))
        try:
            text = await render_chat(body.messages, body, self._api.renderer, request.state.call)
        except ApiError as error:
            raise TemplateError(f"Template error: {error}") from None
        job = TokenizeJob(list_chat_places, (text,), 1, _size(text), "ChatTokenize")
        return await self._run(job, request)

    async def _run(self, job: TokenizeJob, request: Request) -> Response:
        http = request.state.call
        answer = await self._api.service.tokenize(job, TGI, http.metadata, http.connection)
        return Response(answer, media_type="application/json")


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))
