"""Handles `/v1/chat/completions`."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.answers.event_stream import DONE, EventStream
from tgis.router.api.http.call_context import HttpCall
from tgis.router.api.http.default_sampling import set_default_sampling
from tgis.router.api.http.fields.described_fields import describe_parameters
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.merged_streams import merge
from tgis.router.api.models import ModelChoice
from tgis.router.api.openai.answers.dates import unix_time
from tgis.router.api.openai.answers.logprobs import TokenNames
from tgis.router.api.openai.answers.logprobs_encoder import LogprobsEncoder
from tgis.router.api.openai.answers.usage import make_usage, stop_reason
from tgis.router.api.openai.chat.answer_form import AnswerForm, constrain, read_answer_form
from tgis.router.api.openai.chat.answers import WholeAnswer, read_answer
from tgis.router.api.openai.chat.chunks import ChatChunkWriter
from tgis.router.api.openai.chat.messages import TOOLS, render_chat
from tgis.router.api.openai.chat.tools import read_tool_use
from tgis.router.api.openai.chat.types import ChatChoice, ChatCompletion, ChatRequest
from tgis.router.api.openai.errors import ApiError
from tgis.router.api.openai.fields.parameters import to_parameters
from tgis.router.api.openai.fields.refusals import INPUT, describe_refusal, translated_refusals
from tgis.router.api.openai.fields.refused_fields import IN_CHATS, refuse_fields
from tgis.router.api.openai.fields.sampling_fields import check_stream_options, read_fields
from tgis.router.api.openai.fields.structured_outputs import constraint_names, read_guided
from tgis.router.api.openai.rules import OPENAI
from tgis.router.api.service import Result
from tgis.router.grammar.compiler import Guided
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import Parameters

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatJob(NamedTuple):
    """Request after reading."""

    body: ChatRequest
    call: GenerationCall
    form: AnswerForm | None
    """None if answers are plain texts."""
    answer_id: str

    @property
    def has_reasoning(self) -> bool:
        return self.form is not None and self.form.has_reasoning


class ChatCompletions:
    def __init__(self, parts: ServiceParts, default_sampling: Mapping[str, float]) -> None:
        self._parts = parts
        self._default_sampling = default_sampling

    async def answer(self, request: Request) -> Response:
        """Answer a request. Raises ApiError and RouterError."""
        body = await read_fields(_decoder, request)
        job = await self._read(body, request.state.call)
        with translated_refusals(body.model, _names(body)):
            if not body.stream:
                return await self._generate(job)
            events = self._events(job)
            await anext(events)  # returns once the call is admitted, so that a refusal has its own status
            return EventStream(events)

    async def _read(self, body: ChatRequest, http: HttpCall) -> ChatJob:
        """Read a request. Raises ApiError and RouterError."""
        parts = self._parts
        refuse_fields(body, IN_CHATS)
        set_default_sampling(body, self._default_sampling)
        _check(body, parts.service.is_encoder_decoder)
        guided = read_guided(body)
        use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        prompt = await render_chat(body.messages, body, parts.renderer, http)
        shows_tools = parts.renderer.reads(TOOLS)
        form = read_answer_form(parts.formats, use, prompt, body, parts.find_mark, shows_tools)
        choice = await parts.models.choose(body.model)
        call = self._call(body, http, choice, prompt, _parameters(body, constrain(guided, form)), form)
        return ChatJob(body, call, form, f"chatcmpl-{http.id}")

    def _call(
        self,
        body: ChatRequest,
        http: HttpCall,
        choice: ModelChoice,
        prompt: str,
        parameters: Parameters,
        form: AnswerForm | None,
    ) -> GenerationCall:
        marks = form.mark_ids if form is not None else frozenset()
        return GenerationCall(
            "ChatCompletion",
            "stream" if body.stream else "single",
            [prompt],
            parameters,
            partial(describe_parameters, body),
            http.metadata,
            http.connection,
            adapter_id=choice.adapter_id,
            model_id=choice.name,
            adds_special_tokens=bool(body.add_special_tokens),
            tenant=http.tenant,
            api=OPENAI,
            shown_special_ids=marks & self._parts.tokenizer.special_ids,
            describe_refusal=partial(describe_refusal, _names(body)),
            make_stop_scope=None if form is None else form.stop_scope,
        )

    async def _generate(self, job: ChatJob) -> Response:
        body = job.body
        results = await self._parts.service.generate(job.call)
        names = TokenNames(self._parts.vocabulary, bool(body.return_tokens_as_token_ids))
        first = results[0]
        num_top = body.prompt_logprobs
        encoder = LogprobsEncoder(self._parts.encoding_turn)
        assert first.last is not None, "a generation ends with an output"
        answers = [read_answer(result, job.form) for result in results]
        answer = ChatCompletion(
            id=job.answer_id,
            created=unix_time(),
            model=job.call.model_id,
            choices=[
                await _choice(body, index, result, read, names, encoder)
                for index, (result, read) in enumerate(zip(results, answers, strict=True))
            ],
            usage=make_usage(
                len(first.spec.input_ids),
                sum(result.last.num_generated for result in results if result.last is not None),
                first.last.num_cached,
                sum(read.num_reasoning for read in answers) if job.has_reasoning else None,
            ),
            prompt_token_ids=first.spec.input_ids if body.return_token_ids else None,
        )
        if num_top is not None:
            answer.prompt_logprobs = await encoder.prompt(first.input_tokens, names, num_top)
        return encoder.answer(answer)

    async def _events(self, job: ChatJob) -> AsyncGenerator[bytes, None]:
        """Yield an empty event once the call is admitted, then the stream."""
        async with self._parts.service.stream(job.call) as streams:
            yield b""
            names = TokenNames(self._parts.vocabulary, bool(job.body.return_tokens_as_token_ids))
            specs = [stream.spec for stream in streams]
            writer = ChatChunkWriter(job.body, job.answer_id, job.call.model_id, specs, names, job.form)
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
    """Return a chat's own names by the service's names, where they differ."""
    max_tokens = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    own = {INPUT: "messages", "max_new_tokens": max_tokens, "top_n_tokens": "top_logprobs"}
    return own | constraint_names(body)


def _check(body: ChatRequest, is_encoder_decoder: bool) -> None:
    """Check that the fields fit each other. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    check_stream_options(body)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed", "prompt_logprobs")
    if body.prompt_logprobs is not None and is_encoder_decoder:
        raise ApiError(400, "prompt_logprobs is not supported for encoder-decoder models", "prompt_logprobs")


def _parameters(body: ChatRequest, guided: Guided | None) -> Parameters:
    has_logprobs = bool(body.logprobs)
    has_prompt_logprobs = body.prompt_logprobs is not None
    return to_parameters(
        body,
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        guided=guided,
        generated_tokens=has_logprobs or bool(body.return_token_ids),
        input_tokens=has_prompt_logprobs,
        token_logprobs=has_logprobs or has_prompt_logprobs,
        token_ranks=has_prompt_logprobs,
        top_n_tokens=max(body.top_logprobs or 0, body.prompt_logprobs or 0),
    )


async def _choice(
    body: ChatRequest,
    index: int,
    result: Result,
    answer: WholeAnswer,
    names: TokenNames,
    encoder: LogprobsEncoder,
) -> ChatChoice:
    last = result.last
    assert last is not None, "a generation ends with an output"
    return ChatChoice(
        index,
        answer.message,
        await encoder.chat(result.tokens, names, body.top_logprobs or 0) if body.logprobs else None,
        answer.finish_reason,
        stop_reason(last, body.stop_token_ids),
        [token.token_id for token in result.tokens] if body.return_token_ids else None,
    )
