"""`/v1/chat/completions`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.call_context import HttpCall, read_body
from tgis.router.api.http.event_stream import EventStream, merge
from tgis.router.api.http.openai.chat.chunks import ChatChunkWriter
from tgis.router.api.http.openai.chat.messages import render_chat
from tgis.router.api.http.openai.chat.types import AnswerMessage, ChatChoice, ChatCompletion, ChatRequest
from tgis.router.api.http.openai.dates import unix_time
from tgis.router.api.http.openai.errors import ApiError
from tgis.router.api.http.openai.events import DONE
from tgis.router.api.http.openai.fields.parameters import describe_parameters, to_parameters
from tgis.router.api.http.openai.fields.refusals import INPUT, translated_refusals
from tgis.router.api.http.openai.fields.refused_fields import IN_CHATS, refuse_fields
from tgis.router.api.http.openai.fields.sampling_fields import check_stream_options, read_fields
from tgis.router.api.http.openai.fields.structured_outputs import constraint_names, read_guided
from tgis.router.api.http.openai.logprobs import TokenNames
from tgis.router.api.http.openai.long_answers import SlicedEncoder
from tgis.router.api.http.openai.service_parts import OpenAiApi
from tgis.router.api.http.openai.usage import finish_reason, make_usage, stop_reason
from tgis.router.api.service import Result
from tgis.router.requests.call import GenerationCall, Parameters
from tgis.router.requests.doors import OPENAI

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    def __init__(self, api: OpenAiApi) -> None:
        self._api = api

    async def answer(self, request: Request) -> Response:
        """Answer a request. Raises ApiError and RouterError."""
        body = read_fields(_decoder, await read_body(request))
        call = await self._read(body, request.state.call)
        answer_id = f"chatcmpl-{request.state.call.id}"
        with translated_refusals(body.model, _names(body)):
            if not body.stream:
                return await self._generate(body, call, answer_id)
            events = self._events(body, call, answer_id)
            await anext(events)  # returns once the call is admitted: a refusal has a status of its own
            return EventStream(events)

    async def _read(self, body: ChatRequest, http: HttpCall) -> GenerationCall:
        """Read a request. Raises ApiError and RouterError."""
        refuse_fields(body, IN_CHATS)
        _check(body, self._api.service.is_encoder_decoder)
        parameters, choice = _parameters(body), self._api.models.choose(body.model)
        return GenerationCall(
            "ChatCompletion",
            "stream" if body.stream else "single",
            [await render_chat(body.messages, body, self._api.renderer, http.owner)],
            parameters,
            partial(describe_parameters, body),
            http.metadata,
            http.connection,
            adapter_id=choice.adapter_id,
            model_id=choice.name,
            adds_special_tokens=bool(body.add_special_tokens),
            tenant=http.tenant,
            door=OPENAI,
        )

    async def _generate(self, body: ChatRequest, call: GenerationCall, answer_id: str) -> Response:
        results = await self._api.service.generate(call)
        names = TokenNames(self._api.vocabulary, bool(body.return_tokens_as_token_ids))
        first, num_top = results[0], body.prompt_logprobs
        encoder = SlicedEncoder(self._api.encoding_turn)
        assert first.last is not None, "a generation ends with an output"
        answer = ChatCompletion(
            id=answer_id,
            created=unix_time(),
            model=call.model_id,
            choices=[
                await _choice(body, index, result, names, encoder) for index, result in enumerate(results)
            ],
            usage=make_usage(
                len(first.spec.input_ids),
                sum(result.last.num_generated for result in results if result.last is not None),
                first.last.num_cached,
            ),
            prompt_token_ids=first.spec.input_ids if body.return_token_ids else None,
        )
        if num_top is not None:
            answer.prompt_logprobs = await encoder.prompt(first.input_tokens, names, num_top)
        return encoder.answer(answer)

    async def _events(
        self, body: ChatRequest, call: GenerationCall, answer_id: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield an empty event once the call is admitted, and then the stream."""
        async with self._api.service.stream(call) as streams:
            yield b""
            names = TokenNames(self._api.vocabulary, bool(body.return_tokens_as_token_ids))
            specs = [stream.spec for stream in streams]
            writer = ChatChunkWriter(body, answer_id, call.model_id, specs, names)
            for event in writer.begin():
                yield event
            async with aclosing(merge(streams)) as outputs:
                async for index, output in outputs:
                    if event := writer.write(index, output):
                        yield event
            if event := writer.end():
                yield event
        yield DONE


def _names(body: ChatRequest) -> dict[str, str]:
    """Return the service's names of what a chat calls otherwise."""
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    own = {INPUT: "messages", "max_new_tokens": most, "top_n_tokens": "top_logprobs"}
    return own | constraint_names(body)


def _check(body: ChatRequest, is_encoder_decoder: bool) -> None:
    """Check what fields demand of each other. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    check_stream_options(body)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed", "prompt_logprobs")
    if body.prompt_logprobs is not None and is_encoder_decoder:
        raise ApiError(400, "the model tells no log-probabilities of its input", "prompt_logprobs")
    for name in ("max_completion_tokens", "max_tokens"):
        if getattr(body, name) == 0:
            raise ApiError(400, f"{name} must be at least 1", name)


def _parameters(body: ChatRequest) -> Parameters:
    has_logprobs, has_prompt_logprobs = bool(body.logprobs), body.prompt_logprobs is not None
    return to_parameters(
        body,
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        guided=read_guided(body),
        generated_tokens=has_logprobs or bool(body.return_token_ids),
        input_tokens=has_prompt_logprobs,
        token_logprobs=has_logprobs or has_prompt_logprobs,
        token_ranks=has_prompt_logprobs,
        top_n_tokens=max(body.top_logprobs or 0, body.prompt_logprobs or 0),
    )


async def _choice(
    body: ChatRequest, index: int, result: Result, names: TokenNames, encoder: SlicedEncoder
) -> ChatChoice:
    last = result.last
    assert last is not None, "a generation ends with an output"
    return ChatChoice(
        index,
        AnswerMessage("".join(result.text)),
        await encoder.chat(result.tokens, names, body.top_logprobs or 0) if body.logprobs else None,
        finish_reason(last),
        stop_reason(last, body.stop_token_ids),
        [token.token_id for token in result.tokens] if body.return_token_ids else None,
    )
