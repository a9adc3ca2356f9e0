"""Implements `fmaas.GenerationService`, TGIS's calls, from the request's message to the engine and back."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from typing import Any

import grpc

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceServicer
from tgis.router.adapters.registry import AdapterLease, AdapterRegistry
from tgis.router.api.grpc.messages import ResponseWriter, Result
from tgis.router.engine.engine import Engine
from tgis.router.errors import RequestError
from tgis.router.events import Event
from tgis.router.requests.accounting import MISSING_REQUEST, Accounts, Call
from tgis.router.requests.concurrency import Permits
from tgis.router.requests.request_log import GenerationCall, InputLog
from tgis.router.requests.validation import Request, Validator, check_parameters
from tgis.router.sequence import Sequence
from tgis.router.text.tokenizer import Tokenizer

ECHO_GAP = "\n\n"  # between an input and its answer; a text that continues the input needs none
Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(GenerationServiceServicer):
    """Methods of the public service. They raise RouterError, which the error interceptor turns into a
    status."""

    def __init__(
        self,
        engine: Engine,
        validator: Validator,
        tokenizer: Tokenizer,
        adapters: AdapterRegistry,
        permits: Permits,
        tokenize_permits: Permits,
        accounts: Accounts,
        model_kind: pb.ModelInfoResponse.ModelKind,
    ) -> None:
        self._engine, self._validator, self._tokenizer = engine, validator, tokenizer
        self._adapters, self._accounts = adapters, accounts
        self._permits, self._tokenize_permits = permits, tokenize_permits
        self._model_kind = model_kind
        self._writer = ResponseWriter(tokenizer)

    async def Generate(
        self, request: pb.BatchedGenerationRequest, context: Context
    ) -> pb.BatchedGenerationResponse:
        kind = "single" if len(request.requests) == 1 else "batch"
        with self._accounts.open(request, "Generate", kind, _metadata(context)) as call:
            if not (texts := call.texts):
                return pb.BatchedGenerationResponse()
            with self._permits.hold(len(texts)), self._lease(request, call) as lease:
                checked, sequences = await self._check(texts, request, lease, context)
                call.accept(checked, sequences)
                results = await self._collect_all(sequences, call)
        return pb.BatchedGenerationResponse(
            responses=map(self._writer.unary, results, self._echoes(texts, checked))
        )

    async def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: Context
    ) -> AsyncGenerator[pb.GenerationResponse, None]:
        with (
            self._accounts.open(request, "GenerateStream", "stream", _metadata(context)) as call,
            self._permits.hold(1),
            self._lease(request, call) as lease,
        ):
            if not request.HasField("request"):
                raise RequestError(MISSING_REQUEST)
            checked, [sequence] = await self._check(call.texts, request, lease, context)
            call.accept(checked, [sequence])
            async with self._events(sequence, call) as (events, log):
                yield self._writer.header(sequence, call.texts[0] if checked.input_text else "")
                async for event in events:
                    response = self._writer.message(call.take(event, log), sequence)
                    if response is not None:
                        yield response

    async def Tokenize(  # type: ignore[override]
        self, request: pb.BatchedTokenizeRequest, context: Context
    ) -> bytes:
        """Return a serialized BatchedTokenizeResponse, because serializing a large one takes long."""
        started_at, metrics = time.monotonic(), self._accounts.metrics
        metrics.tokenize_count.add()
        metrics.tokenize_input_count.add(amount=len(request.requests))
        with (
            self._accounts.tracing.call("Tokenize", _metadata(context)),
            self._accounts.counting_overload("Tokenize"),
            self._tokenize_permits.hold(1),
        ):
            response, num_tokens = await self._tokenizer.tokenize(request, context.peer())
        metrics.tokenize_tokens.observe(num_tokens)
        metrics.tokenize_duration.observe(time.monotonic() - started_at)
        return response

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Context) -> pb.ModelInfoResponse:
        limits = self._validator.limits
        with self._accounts.tracing.call("ModelInfo", _metadata(context)):
            return pb.ModelInfoResponse(
                model_kind=self._model_kind,
                max_sequence_length=limits.max_sequence_length,
                max_new_tokens=limits.max_new_tokens,
            )

    def _echoes(self, texts: list[str], request: Request) -> list[str]:
        """Return the beginnings of unary answers. A stream's header has the text without a gap."""
        if not request.input_text:
            return [""] * len(texts)
        gap = ECHO_GAP if self._model_kind == pb.ModelInfoResponse.ENCODER_DECODER else ""
        return [text + gap for text in texts]

    def _lease(self, request: GenerationCall, call: Call) -> AbstractContextManager[AdapterLease]:
        prefix_id = request.prefix_id if request.HasField("prefix_id") else None
        adapter_id = request.adapter_id if request.HasField("adapter_id") else None
        return self._adapters.lease(prefix_id, adapter_id, call.request_id)

    async def _check(
        self, texts: list[str], request: GenerationCall, lease: AdapterLease, context: Context
    ) -> tuple[Request, list[Sequence]]:
        checked = check_parameters(request.params, self._validator.limits)
        return checked, await self._validator.sequences(texts, checked, lease, context.peer())

    @asynccontextmanager
    async def _events(
        self, sequence: Sequence, call: Call, index: int = 0
    ) -> AsyncIterator[tuple[AsyncGenerator[Event, None], InputLog]]:
        """Open the events of a call's input at `index`. The caller must pass each event to `call.take`."""
        with call.input(index, sequence) as log:
            async with aclosing(self._engine.generate(sequence)) as events:
                yield events, log

    async def _collect_all(self, sequences: list[Sequence], call: Call) -> list[Result]:
        """Collect all generations. The first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._collect(sequence, call, index))
                    for index, sequence in enumerate(sequences)
                ]
        except ExceptionGroup as failures:
            failures.__traceback__ = None  # one of asyncio's frames in it holds the group
            failure = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise failure  # not in `except`, which would chain it to the group that holds it

    async def _collect(self, sequence: Sequence, call: Call, index: int) -> Result:
        result = Result(sequence)
        async with self._events(sequence, call, index) as (events, log):
            async for event in events:
                result.add(call.take(event, log))
        return result


def _metadata(context: Context) -> Iterable[tuple[str, str | bytes]]:
    return context.invocation_metadata() or ()
