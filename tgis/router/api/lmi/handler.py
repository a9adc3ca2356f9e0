"""Handles `/invocations` and the routes that name a model."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.answers.event_stream import EventStream
from tgis.router.api.http.answers.sliced_encoder import SlicedEncoder
from tgis.router.api.http.answers.token_texts import TokenForms
from tgis.router.api.http.call_context import HttpCall, media_type, read_body
from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.errors import OWN_FORM
from tgis.router.api.http.fields.described_fields import describe_parameters
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.lmi.answers import AnswerWriter
from tgis.router.api.lmi.chat_lines import ChatLineErrors, with_lines
from tgis.router.api.lmi.errors import LmiErrors
from tgis.router.api.lmi.forms import Form, choose_form
from tgis.router.api.lmi.lines import LineErrors, LineWriter
from tgis.router.api.lmi.parameters import LmiParameters, check_parameters, to_parameters
from tgis.router.api.lmi.request import ADAPTER, LmiRequest, check_headers, check_model, read_request
from tgis.router.api.lmi.rules import LMI
from tgis.router.api.renamed_parameters import renamed_log_text, renamed_text
from tgis.router.api.service import Result
from tgis.router.errors import NotFoundError, RequestError
from tgis.router.events import InputTokens
from tgis.router.requests.call import GenerationCall

MAX_ADAPTER_CHARS = 256  # maximum length of the id of a missing adapter
NAMES = {
    "text": "inputs",
    "adapter_id": "adapters",
    "truncate_input_tokens": "truncate",
    "min_new_tokens": "min_tokens",
}
"""This API's names of parameters by the service's names, where they differ."""


@dataclass(frozen=True)
class LmiJob:
    """Request after reading."""

    body: LmiRequest
    fields: LmiParameters
    adapter_ids: list[str | None]
    form: Form
    method: str

    @property
    def has_details(self) -> bool:
        """True if the answer has details. Only details can show several texts."""
        if self.fields.num_texts > 1:
            return True
        return self.form.is_tgi if self.fields.details is None else self.fields.details

    @property
    def kind(self) -> str:
        if self.form.is_stream:
            return "stream"
        return "single" if len(self.body.texts) == 1 else "batch"


@contextmanager
def translated_refusals(adapter_id: str | None) -> Iterator[None]:
    """Replace the service's names of parameters in its refusals by this API's names."""
    try:
        yield
    except RequestError as error:
        text = renamed_text(error, NAMES)
        parameter = NAMES.get(error.parameter, error.parameter)
        if isinstance(error, NotFoundError):
            shown = (adapter_id or "")[:MAX_ADAPTER_CHARS]
            text = f"Adapter {shown} is not registered"
            parameter = "adapters"
        refusal = RequestError(text, parameter, describe_refusal(error))
        refusal.is_logged = error.is_logged
        raise refusal from None


def describe_refusal(error: RequestError) -> str:
    """Return a refusal's text for the log."""
    is_missing = isinstance(error, NotFoundError)
    return "the adapter is not registered" if is_missing else renamed_log_text(error, NAMES)


class Invocations:
    def __init__(self, parts: ServiceParts, chats: ChatApi, errors: LmiErrors, formatter: str | None) -> None:
        """Create the handler. `formatter` is the operator's choice; with None, the request decides."""
        self._parts = parts
        self._chats = chats
        self._errors = errors
        self._formatter = formatter

    async def invoke(self, request: Request) -> Response:
        return await self._answer(request, "Invocation")

    async def predict(self, request: Request) -> Response:
        return await self._answer(request, "Prediction")

    async def _answer(self, request: Request, method: str) -> Response:
        """Answer a request. Raises HttpError and RouterError."""
        check_headers(request)
        body = read_request(media_type(request), await read_body(request))
        check_model(request, body, self._parts.models.names)
        adapter = request.headers.get(ADAPTER)
        if body.inputs is None:
            if adapter:
                raise RequestError("an adapter of messages or a prompt is named by model", "adapters")
            setattr(request.state, OWN_FORM, ChatLineErrors(self._chats.errors))
            answer = self._chats.answer_chat if body.is_chat else self._chats.answer_completion
            return with_lines(await answer(request))
        job = self._read(body, adapter, method)
        return await (self._stream if job.form.is_stream else self._generate)(job, request)

    def _read(self, body: LmiRequest, adapter: str | None, method: str) -> LmiJob:
        """Read a request with inputs. Raises RequestError."""
        parts = self._parts
        fields = body.parameters or LmiParameters()
        if len(body.texts) > (maximum := parts.limits.max_inputs):
            raise RequestError(f"inputs must have at most {maximum} texts", "inputs")
        if body.stream and len(body.texts) > 1:
            raise RequestError("a list of inputs cannot be streamed", "stream")
        is_list = not isinstance(body.inputs, str)
        form = choose_form(self._formatter, bool(body.stream), is_list and not body.stream)
        maximum = parts.limits.max_best_of_for(LMI)
        check_parameters(fields, form.is_stream, maximum, parts.service.is_encoder_decoder)
        return LmiJob(body, fields, body.adapter_ids(adapter), form, method)

    async def _generate(self, job: LmiJob, request: Request) -> Response:
        calls = {each: self._call(job, request.state.call, each) for each in dict.fromkeys(job.adapter_ids)}
        results = await self._results(job, calls)
        names = TokenForms(self._parts.service.vocabulary_of(calls[job.adapter_ids[0]]))
        encoder = SlicedEncoder(self._parts.encoding_turn)
        writer = AnswerWriter(job.fields, job.form, job.has_details, names, encoder)
        is_list = not isinstance(job.body.inputs, str) or job.form.is_tgi
        return await writer.write(job.body.texts, results, is_list)

    async def _results(self, job: LmiJob, calls: Mapping[str | None, GenerationCall]) -> list[Result]:
        """Generate the texts of all inputs in one call for each adapter. The first failure ends all calls."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {each: group.create_task(self._run(call)) for each, call in calls.items()}
        except ExceptionGroup as failures:
            failure = failures.exceptions[0]
        else:
            left = {each: iter(task.result()) for each, task in tasks.items()}
            return [next(left[each]) for each in job.adapter_ids for _ in range(job.fields.num_texts)]
        raise failure  # outside of `except`, which would chain it to the group that holds it

    async def _run(self, call: GenerationCall) -> list[Result]:
        with translated_refusals(call.adapter_id):
            return await self._parts.service.generate(call)

    async def _stream(self, job: LmiJob, request: Request) -> Response:
        [text] = job.body.texts
        call = self._call(job, request.state.call, job.adapter_ids[0])
        names = TokenForms(self._parts.service.vocabulary_of(call))
        writer = LineWriter(text, job.fields, job.form, job.has_details, names)
        setattr(request.state, OWN_FORM, LineErrors(self._errors, writer))
        events = self._events(call, writer)
        with translated_refusals(job.adapter_ids[0]):
            await anext(events)  # returns once the call is admitted, so that a refusal has its own status
        return EventStream(events, job.form.media_type)

    async def _events(self, call: GenerationCall, writer: LineWriter) -> AsyncGenerator[bytes, None]:
        """Yield an empty event once the call is admitted, then the stream."""
        async with self._parts.service.stream(call) as [stream]:
            yield b""
            async with aclosing(stream.outputs) as outputs:
                async for output in outputs:
                    assert not isinstance(output, InputTokens), "streams return no input tokens"
                    if lines := writer.write(output, stream.spec):
                        yield lines

    def _call(self, job: LmiJob, http: HttpCall, adapter_id: str | None) -> GenerationCall:
        """Return the call for all inputs with this adapter."""
        texts = job.body.texts
        own = [text for text, each in zip(texts, job.adapter_ids, strict=True) if each == adapter_id]
        shows_tokens = job.form.is_stream or job.has_details
        return GenerationCall(
            job.method,
            job.kind,
            own,
            to_parameters(job.fields, shows_tokens, job.has_details and job.fields.wants_inputs),
            partial(describe_parameters, job.fields),
            http.metadata,
            http.connection,
            adapter_id=adapter_id,
            model_id=self._parts.models.names[0],
            tenant=http.tenant,
            api=LMI,
            describe_refusal=describe_refusal,
        )
