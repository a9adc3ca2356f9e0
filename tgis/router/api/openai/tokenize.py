"""Serves `/tokenize`, `/detokenize` and `/version`."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis import __version__
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.openai.chat.messages import render_chat
from tgis.router.api.openai.chat.types import Message, Tool
from tgis.router.api.openai.errors import ApiError
from tgis.router.api.openai.fields.refusals import INPUT, translated_refusals
from tgis.router.api.openai.fields.refused_fields import refuse_fields
from tgis.router.api.openai.fields.sampling_fields import TokenId, read_fields
from tgis.router.api.openai.rules import OPENAI
from tgis.router.text.token_lists import join_tokens, list_tokens
from tgis.router.text.tokenization import TokenizeJob

BYTES_PER_ID = 8  # bytes of text that cost as much as one token id


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Default: True for a prompt, False for messages."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    tools: list[Tool] | None = None
    reasoning_effort: str | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[TokenId]
    model: str | None = None


class Version(msgspec.Struct):
    version: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class TokenRoutes:
    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts

    async def tokenize(self, request: Request) -> Response:
        body = await read_fields(_tokenize_decoder, request)
        job = await self._tokenize_job(body, request)
        with translated_refusals(body.model, {INPUT: "prompt" if body.messages is None else "messages"}):
            return await self._run(job, request)

    async def detokenize(self, request: Request) -> Response:
        body = await read_fields(_detokenize_decoder, request)
        num_bytes = BYTES_PER_ID * len(body.tokens)
        job = TokenizeJob(join_tokens, (body.tokens,), 1, num_bytes, "Detokenize")
        with translated_refusals(body.model, {INPUT: "tokens"}):
            return await self._run(job, request)

    async def version(self, request: Request) -> Response:
        return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")

    async def _tokenize_job(self, body: TokenizeBody, request: Request) -> TokenizeJob:
        refuse_fields(body)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "either prompt or messages must be given, and not both", "prompt")
        adds = body.add_special_tokens
        text = body.prompt
        if body.messages is not None:
            text = await render_chat(body.messages, body, self._parts.renderer, request.state.call)
        assert text is not None, "a prompt or messages are there"
        adds_special_tokens = body.messages is None if adds is None else adds
        max_tokens = self._parts.limits.max_sequence_length
        arguments = (text, adds_special_tokens, bool(body.return_token_strs), max_tokens)
        return TokenizeJob(list_tokens, arguments, 1, len(text.encode(errors="replace")))

    async def _run(self, job: TokenizeJob, request: Request) -> Response:
        http = request.state.call
        answer = await self._parts.service.tokenize(job, OPENAI, http.metadata, http.connection)
        return Response(answer, media_type="application/json")
