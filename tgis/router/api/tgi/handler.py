"""Handles `/generate`, `/generate_stream`, `/`, and SageMaker's `/invocations`."""

from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.answers.event_stream import EventStream
from tgis.router.api.http.answers.sliced_encoder import SlicedEncoder
from tgis.router.api.http.answers.token_texts import TokenForms
from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.errors import OWN_FORM
from tgis.router.api.http.fields.described_fields import describe_parameters
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.tgi.answers import GenerateJob, write_answer
from tgis.router.api.tgi.errors import BodyError
from tgis.router.api.tgi.events import EventWriter
from tgis.router.api.tgi.fields.bodies import WRONG, decode, main_field, read_json
from tgis.router.api.tgi.fields.parameters import read_parameters
from tgis.router.api.tgi.fields.refusals import describe_refusal, translated_refusals
from tgis.router.api.tgi.rules import TGI
from tgis.router.api.tgi.types import GenerateParameters, GenerateRequest
from tgis.router.events import InputTokens
from tgis.router.requests.call import GenerationCall

SILENCE_S = 15.0  # an idle stream gets a comment after this time

_decoder = msgspec.json.Decoder(GenerateRequest)


class Generation:
    def __init__(self, parts: ServiceParts, chats: ChatApi) -> None:
        self._parts = parts
        self._chats = chats
        self._compute_type = parts.config.compute_type or "cpu"

    async def generate(self, request: Request) -> Response:
        body = decode(_decoder, await read_json(request))
        return await self._answer(self._read(body, request, "Generate", False))

    async def stream(self, request: Request) -> Response:
        body = decode(_decoder, await read_json(request))
        return self._stream(self._read(body, request, "GenerateStream", True))

    async def generate_any(self, request: Request) -> Response:
        return await self._any(request, "GenerateAny")

    async def invoke(self, request: Request) -> Response:
        field = main_field(await read_json(request))
        if field == "inputs":
            return await self._any(request, "Invocation")
        if not field:
            raise BodyError(422, WRONG.format("it has none of `inputs`, `messages` and `prompt`"))
        setattr(request.state, OWN_FORM, self._chats.errors)
        is_chat = field == "messages"
        answer = self._chats.answer_chat if is_chat else self._chats.answer_completion
        return await answer(request)

    async def _any(self, request: Request, method: str) -> Response:
        body = decode(_decoder, await read_json(request))
        job = self._read(body, request, method, bool(body.stream), is_in_list=True)
        return self._stream(job) if body.stream else await self._answer(job)

    def _read(
        self, body: GenerateRequest, request: Request, method: str, is_stream: bool, is_in_list: bool = False
    ) -> GenerateJob:
        http = request.state.call
        given = body.parameters or GenerateParameters()
        parameters, refusal = read_parameters(body, is_stream, self._parts.limits)
        call = GenerationCall(
            method,
            "stream" if is_stream else "single",
            [body.inputs],
            parameters,
            partial(describe_parameters, given),
            http.metadata,
            http.connection,
            adapter_id=given.adapter_id or None,
            model_id=self._parts.models.names[0],
            refusal=refusal,
            tenant=http.tenant,
            api=TGI,
            describe_refusal=partial(describe_refusal, parameters, self._parts.limits),
        )
        forms = TokenForms(self._parts.service.vocabulary_of(call))
        return GenerateJob(body, call, forms, is_in_list, self._compute_type)

    async def _answer(self, job: GenerateJob) -> Response:
        with translated_refusals(job.call.parameters, self._parts.limits):
            results = await self._parts.service.generate(job.call)
        return await write_answer(job, results, SlicedEncoder(self._parts.encoding_turn))

    def _stream(self, job: GenerateJob) -> Response:
        response = EventStream(self._events(job), silence_s=SILENCE_S)
        response.headers.update(job.headers)
        return response

    async def _events(self, job: GenerateJob) -> AsyncGenerator[bytes, None]:
        """Yield an empty event, then the stream. It begins at once, because even a refusal is an event
        here."""
        yield b""
        with translated_refusals(job.call.parameters, self._parts.limits):
            async with self._parts.service.stream(job.call) as (stream,):
                writer = EventWriter(job, stream.spec)
                async for output in stream.outputs:
                    if not isinstance(output, InputTokens) and (events := writer.write(output)):
                        yield events
