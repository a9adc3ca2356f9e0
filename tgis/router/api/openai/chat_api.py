"""Collects the handlers of chats and completions, which routes of other APIs call too."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.call_context import HttpCall
from tgis.router.api.http.default_sampling import read_default_sampling
from tgis.router.api.http.errors import ErrorForm
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.openai.chat.handler import ChatCompletions
from tgis.router.api.openai.chat.messages import render_chat
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.completions.handler import Completions
from tgis.router.api.openai.errors import OPENAI_ERRORS


class OpenAiChatApi:
    errors: ErrorForm = OPENAI_ERRORS
    request_type = ChatRequest

    def __init__(self, parts: ServiceParts) -> None:
        """Read the default values of sampling fields. Raises StartupError."""
        self.default_sampling: Mapping[str, float] = read_default_sampling(parts.config)
        defaults = self.default_sampling
        self._renderer = parts.renderer
        self._chats = ChatCompletions(parts, defaults)
        self._completions = Completions(parts, defaults)

    async def answer_chat(self, request: Request) -> Response:
        return await self._chats.answer(request)

    async def answer_completion(self, request: Request) -> Response:
        return await self._completions.answer(request)

    async def render(self, chat: ChatRequest, call: HttpCall) -> str:
        return await render_chat(chat.messages, chat, self._renderer, call)
