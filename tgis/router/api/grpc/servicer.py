"""Implements `fmaas.GenerationService`, TGIS's calls, from the request's message to the engine and back."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
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
from tgis.router.requests.accounting import MISSING_REQUEST, Accounting, CallAccount, Record
from tgis.router.requests.concurrency import ConcurrencyLimit
from tgis.router.requests.request_log import GenerationCall, Metadata
from tgis.router.requests.validation import CallParameters, Validator, check_parameters
from tgis.router.sequence import Sequence
from tgis.router.text.tokenizer import Tokenizer

ECHO_GAP = "\n\n"  # between an input and its answer; a text that continues the input needs none
Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(GenerationServiceServicer):
    """Methods of the public service. The error interceptor turns their RouterErrors into statuses."""

    def __init__(
        self,
        engine: Engine,
        validator: Validator,
        tokenizer: Tokenizer,
        adapters: AdapterRegistry,
        concurrency: ConcurrencyLimit,
        tokenize_concurrency: ConcurrencyLimit,
        accounting: Accounting,
        model_kind: pb.ModelInfoResponse.ModelKind,
    ) -> None:
        self._engine, self._validator, self._tokenizer = engine, validator, tokenizer
        self._adapters, self._accounting = adapters, accounting
        self._concurrency, self._tokenize_concurrency = concurrency, tokenize_concurrency
        self._model_kind = model_kind
        self._writer = ResponseWriter(tokenizer)

    async def Generate(
        self, request: pb.BatchedGenerationRequest, context: Context
    ) -> pb.BatchedGenerationResponse:
        kind = "single" if len(request.requests) == 1 else "batch"
        with self._accounting.open(request, "Generate", kind, _metadata(context)) as account:
            if not (texts := account.texts):
                return pb.BatchedGenerationResponse()
            with self._concurrency.acquire(len(texts)), self._lease(request, account) as lease:
                checked, sequences = await self._check(texts, request, lease, context)
                account.accept(checked, sequences)
                results = await self._collect_all(sequences, account)
        return pb.BatchedGenerationResponse(
            responses=map(self._writer.unary, results, self._echoes(texts, checked))
        )

    async def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: Context
    ) -> AsyncGenerator[pb.GenerationResponse, None]:
        with (
            self._accounting.open(request, "GenerateStream", "stream", _metadata(context)) as account,
            self._concurrency.acquire(1),
            self._lease(request, account) as lease,
        ):
            if not request.HasField("request"):
                raise RequestError(MISSING_REQUEST)
            checked, [sequence] = await self._check(account.texts, request, lease, context)
            account.accept(checked, [sequence])
            async with self._events(sequence, account) as (events, record):
                yield self._writer.header(sequence, account.texts[0] if checked.input_text else "")
                async for event in events:
                    response = self._writer.message(record(event), sequence)
                    if response is not None:
                        yield response

    async def Tokenize(  # type: ignore[override]
        self, request: pb.BatchedTokenizeRequest, context: Context
    ) -> bytes:
        """Return a serialized BatchedTokenizeResponse, because serializing a large one takes long."""
        started_at, metrics = time.monotonic(), self._accounting.metrics
        metrics.tokenize_count.add()
        metrics.tokenize_input_count.add(amount=len(request.requests))
        with (
            self._accounting.tracing.call("Tokenize", _metadata(context)),
            self._accounting.counting_overload("Tokenize"),
            self._tokenize_concurrency.acquire(1),
        ):
            response, num_tokens = await self._tokenizer.tokenize(request, context.peer())
        metrics.tokenize_tokens.observe(num_tokens)
        metrics.tokenize_duration.observe(time.monotonic() - started_at)
        return response

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Context) -> pb.ModelInfoResponse:
        limits = self._validator.limits
        with self._accounting.tracing.call("ModelInfo", _metadata(context)):
            return pb.ModelInfoResponse(
                model_kind=self._model_kind,
                max_sequence_length=limits.max_sequence_length,
                max_new_tokens=limits.max_new_tokens,
            )

    def _echoes(self, texts: list[str], params: CallParameters) -> list[str]:
        """Return the beginnings of unary answers. A stream's header has the text without a gap."""
        if not params.input_text:
            return [""] * len(texts)
        gap = ECHO_GAP if self._model_kind == pb.ModelInfoResponse.ENCODER_DECODER else ""
        return [text + gap for text in texts]

    def _lease(self, request: GenerationCall, account: CallAccount) -> AbstractContextManager[AdapterLease]:
        prefix_id = request.prefix_id if request.HasField("prefix_id") else None
        adapter_id = request.adapter_id if request.HasField("adapter_id") else None
        return self._adapters.lease(prefix_id, adapter_id, account.request_id)

    async def _check(
        self, texts: list[str], request: GenerationCall, lease: AdapterLease, context: Context
    ) -> tuple[CallParameters, list[Sequence]]:
        checked = check_parameters(request.params, self._validator.limits)
        return checked, await self._validator.sequences(texts, checked, lease, context.peer())

    @asynccontextmanager
    async def _events(
        self, sequence: Sequence, account: CallAccount, index: int = 0
    ) -> AsyncIterator[tuple[AsyncGenerator[Event, None], Record]]:
        """Open an input's events. The caller must pass each to the function beside them before using it."""
        with account.input(index, sequence) as record:
            async with aclosing(self._engine.generate(sequence)) as events:
                yield events, record

    async def _collect_all(self, sequences: list[Sequence], account: CallAccount) -> list[Result]:
        """Collect all generations. The first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._collect(sequence, account, index))
                    for index, sequence in enumerate(sequences)
                ]
        except ExceptionGroup as failures:
            failures.__traceback__ = None  # one of asyncio's frames in it holds the group
            failure = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise failure  # not in `except`, which would chain it to the group that holds it

    async def _collect(self, sequence: Sequence, account: CallAccount, index: int) -> Result:
        result = Result(sequence)
        async with self._events(sequence, account, index) as (events, record):
            async for event in events:
                result.add(record(event))
        return result


def _metadata(context: Context) -> Metadata:
    return context.invocation_metadata() or ()
