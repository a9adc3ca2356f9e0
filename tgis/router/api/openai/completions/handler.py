"""Handles `/v1/completions`."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.answers.event_stream import DONE, EventStream
from tgis.router.api.http.call_context import HttpCall
from tgis.router.api.http.default_sampling import set_default_sampling
from tgis.router.api.http.fields.described_fields import describe_parameters
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.merged_streams import merge
from tgis.router.api.openai.answers.dates import unix_time
from tgis.router.api.openai.answers.logprobs_encoder import LogprobsEncoder
from tgis.router.api.openai.completions.choices import CompletionJob, write_choices
from tgis.router.api.openai.completions.chunks import ChunkWriter
from tgis.router.api.openai.completions.types import Completion, CompletionRequest
from tgis.router.api.openai.errors import ApiError
from tgis.router.api.openai.fields.parameters import to_parameters
from tgis.router.api.openai.fields.refusals import INPUT, describe_refusal, translated_refusals
from tgis.router.api.openai.fields.refused_fields import refuse_fields
from tgis.router.api.openai.fields.sampling_fields import check_stream_options, read_fields
from tgis.router.api.openai.fields.structured_outputs import constraint_names, read_guided
from tgis.router.api.openai.rules import OPENAI
from tgis.router.events import InputTokens
from tgis.router.requests.call import GenerationCall, write_ids
from tgis.router.requests.parameters import Parameters
from tgis.router.requests.validation import RequestLimits

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
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

    async def _read(self, body: CompletionRequest, http: HttpCall) -> CompletionJob:
        """Read a request. Raises ApiError."""
        refuse_fields(body)
        set_default_sampling(body, self._default_sampling)
        limits = self._parts.limits
        texts, are_ids = _read_prompts(body.prompt, limits.max_inputs)
        _check(body, limits, self._parts.service.is_encoder_decoder)
        choice = await self._parts.models.choose(body.model)
        call = GenerationCall(
            "Completion",
            "stream" if body.stream else "single" if len(texts) == 1 else "batch",
            texts,
            _parameters(body),
            partial(describe_parameters, body),
            http.metadata,
            http.connection,
            adapter_id=choice.adapter_id,
            model_id=choice.name,
            inputs_are_ids=are_ids,
            adds_special_tokens=body.add_special_tokens is not False,
            tenant=http.tenant,
            api=OPENAI,
            describe_refusal=partial(describe_refusal, _names(body)),
        )
        header = Completion(id=f"cmpl-{http.id}", created=unix_time(), model=choice.name, choices=[])
        encoder = LogprobsEncoder(self._parts.encoding_turn)
        return CompletionJob(body, call, header, self._parts.vocabulary, encoder)

    async def _generate(self, job: CompletionJob) -> Response:
        results = await self._parts.service.generate(job.call)
        choices, usage = await write_choices(job, results)
        return job.encoder.answer(msgspec.structs.replace(job.header, choices=choices, usage=usage))

    async def _events(self, job: CompletionJob) -> AsyncGenerator[bytes, None]:
        """Yield an empty event once the call is admitted, then the stream."""
        async with self._parts.service.stream(job.call) as streams:
            yield b""
            writer = ChunkWriter(job, [stream.spec for stream in streams])
            async for event in writer.begin():
                yield event
            async with aclosing(merge(streams)) as outputs:
                async for index, output in outputs:
                    if isinstance(output, InputTokens):
                        async for event in writer.write_prompt(index, output.tokens):
                            yield event
                    else:
                        for event in writer.write(index, output):
                            yield event
            for event in writer.end():
                yield event
        yield DONE


def _read_prompts(
    prompt: str | list[str | int | list[int]] | None, max_prompts: int
) -> tuple[list[str], bool]:
    """Return the prompts of a request, and True if they are token ids. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt], False
    if not prompt:
        raise ApiError(400, "prompt must be a text, token ids, or a list of either", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ApiError(400, "prompt must not mix texts and token ids", "prompt")
    if kinds == {int}:
        return [write_ids(item for item in prompt if isinstance(item, int))], True
    if len(prompt) > max_prompts:
        raise ApiError(400, f"prompt must have at most {max_prompts} prompts", "prompt")
    if kinds == {str}:
        return [item for item in prompt if isinstance(item, str)], False
    return [write_ids(item) for item in prompt if isinstance(item, list)], True


def _names(body: CompletionRequest) -> dict[str, str]:
    """Return a completion's own names by the service's names, where they differ."""
    return {INPUT: "prompt"} | constraint_names(body)


def _check(body: CompletionRequest, limits: RequestLimits, is_encoder_decoder: bool) -> None:
    """Check that the fields fit each other. Raises ApiError."""
    wants_input = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
    if wants_input and is_encoder_decoder:
        raise ApiError(400, "prompt_logprobs is not supported for encoder-decoder models", "prompt_logprobs")
    least = 0 if body.echo or body.prompt_logprobs is not None else 1
    if body.max_tokens is not None and body.max_tokens < least:
        unless = ", or 0 with echo or prompt_logprobs" if least else ""
        raise ApiError(400, f"max_tokens must be >= {least}{unless}", "max_tokens")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise ApiError(400, "best_of must be >= n", "best_of")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise ApiError(400, "best_of cannot be streamed", "best_of")
    if (max_best_of := limits.max_best_of_for(OPENAI)) < (body.best_of or 1):
        raise ApiError(400, f"best_of must be <= {max_best_of}", "best_of")
    check_stream_options(body)


def _parameters(body: CompletionRequest) -> Parameters:
    has_logprobs, has_prompt_logprobs = body.logprobs is not None, body.prompt_logprobs is not None
    is_ranked = (body.best_of or 1) > (body.n or 1)
    is_scored_only = body.max_tokens == 0  # one token is computed and dropped
    return to_parameters(
        body,
        1 if is_scored_only else body.max_tokens,
        n=body.best_of or body.n or 1,
        min_new_tokens=0 if is_scored_only else body.min_tokens or 0,
        guided=read_guided(body),
        generated_tokens=has_logprobs or is_ranked or bool(body.return_token_ids),
        input_tokens=has_prompt_logprobs or (has_logprobs and bool(body.echo)),
        token_logprobs=has_logprobs or has_prompt_logprobs or is_ranked,
        token_ranks=has_prompt_logprobs,
        top_n_tokens=max(body.logprobs or 0, body.prompt_logprobs or 0),
    )
