"""`fmaas.GenerationService`: the public messages, in the shapes and orders that TGIS's clients expect."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceServicer
from tgis.router.engine import Engine, Failed, InputTokens, Output
from tgis.router.errors import OverloadedError, RequestError, RouterError
from tgis.router.metrics import Metrics
from tgis.router.permits import Permits
from tgis.router.sequence import Details, Sequence, StopReason, TokenDetail
from tgis.router.tokenizer import Tokenizer, byte_offsets
from tgis.router.validation import Request, Validator, check_parameters

MISSING_REQUEST = "missing request"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class _Result:
    """A whole generation, collected for a unary answer."""

    text: list[str] = field(default_factory=list)
    tokens: list[TokenDetail] = field(default_factory=list)
    input_tokens: tuple[TokenDetail, ...] = ()
    last: Output | None = None


class GenerationService(GenerationServiceServicer):
    """Answers raise RouterError; the door turns those into statuses."""

    def __init__(
        self,
        engine: Engine,
        validator: Validator,
        tokenizer: Tokenizer,
        permits: Permits,
        metrics: Metrics,
        model_kind: pb.ModelInfoResponse.ModelKind,
    ) -> None:
        self._engine, self._validator, self._tokenizer = engine, validator, tokenizer
        self._permits, self._metrics, self._model_kind = permits, metrics, model_kind

    async def Generate(
        self, request: pb.BatchedGenerationRequest, context: Context
    ) -> pb.BatchedGenerationResponse:
        started, num_inputs = time.monotonic(), len(request.requests)
        kind = "single" if num_inputs == 1 else "batch"
        self._metrics.request_count.add(kind)
        if not num_inputs:
            return pb.BatchedGenerationResponse()
        self._metrics.request_input_count.add(amount=num_inputs)
        with self._counting_failures(), self._permits.hold(num_inputs):
            texts = [item.text for item in request.requests]
            checked, sequences = await self._check(texts, request)
            results = await self._collect_all(sequences)
        for result in results:
            self._count_success(kind, started, result.last)
        responses = [
            self._unary_response(text, checked, sequence, result)
            for text, sequence, result in zip(texts, sequences, results, strict=True)
        ]
        return pb.BatchedGenerationResponse(responses=responses)

    async def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: Context
    ) -> AsyncIterator[pb.GenerationResponse]:
        started = time.monotonic()
        self._metrics.request_count.add("stream")
        self._metrics.request_input_count.add()
        with self._counting_failures(), self._permits.hold(1):
            if not request.HasField("request"):
                raise RequestError(MISSING_REQUEST)
            checked, [sequence] = await self._check([request.request.text], request)
            yield pb.GenerationResponse(
                input_token_count=sequence.prompt_len,
                seed=sequence.sampling.seed,
                text=request.request.text if checked.input_text else "",
            )
            async with aclosing(self._events(sequence)) as events:
                async for event in events:
                    match event:
                        case InputTokens():
                            tokens = self._token_infos(event.tokens, sequence.details)
                            yield pb.GenerationResponse(input_tokens=tokens, input_token_count=len(tokens))
                        case Output():
                            if (response := self._stream_response(event, sequence)) is not None:
                                yield response
                            if event.reason is not StopReason.NOT_FINISHED:
                                self._count_success("stream", started, event)

    async def Tokenize(
        self, request: pb.BatchedTokenizeRequest, context: Context
    ) -> pb.BatchedTokenizeResponse:
        texts, limit = [item.text for item in request.requests], request.truncate_input_tokens
        responses = []
        for text, encoding in zip(texts, await self._tokenizer.encode(texts), strict=True):
            num_tokens = len(encoding.token_ids)
            start = max(num_tokens - limit, 0) if limit else 0
            response = pb.TokenizeResponse(token_count=num_tokens - start)
            if request.return_tokens:
                response.tokens.extend(encoding.pieces[start:])
            if request.return_offsets:
                offsets = byte_offsets(text, encoding.offsets[start:])
                response.offsets.extend(pb.TokenizeResponse.Offset(start=a, end=b) for a, b in offsets)
            responses.append(response)
        return pb.BatchedTokenizeResponse(responses=responses)

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Context) -> pb.ModelInfoResponse:
        limits = self._validator.limits
        return pb.ModelInfoResponse(
            model_kind=self._model_kind,
            max_sequence_length=limits.max_sequence_length,
            max_new_tokens=limits.max_new_tokens,
        )

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """Counts an error that passes through, once, under the label of its kind."""
        try:
            yield
        except RequestError as error:
            if str(error) != MISSING_REQUEST:  # TGIS does not count this one
                self._metrics.request_failure.add("validation")
            raise
        except OverloadedError:
            self._metrics.request_failure.add("conc_limit")
            raise
        except RouterError:
            self._metrics.request_failure.add("generate")
            raise

    async def _check(
        self, texts: list[str], request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest
    ) -> tuple[Request, list[Sequence]]:
        checked = check_parameters(request.params, self._validator.limits)
        prefix_id = request.prefix_id if request.HasField("prefix_id") else None
        adapter_id = request.adapter_id if request.HasField("adapter_id") else None
        return checked, await self._validator.sequences(texts, checked, prefix_id, adapter_id)

    async def _events(self, sequence: Sequence) -> AsyncGenerator[InputTokens | Output, None]:
        """Of one generation; one that fails raises RouterError."""
        async with aclosing(self._engine.generate(sequence)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise _error(event)
                yield event

    async def _collect_all(self, sequences: list[Sequence]) -> list[_Result]:
        """All or nothing: the first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._collect(sequence)) for sequence in sequences]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _collect(self, sequence: Sequence) -> _Result:
        result = _Result()
        async with aclosing(self._events(sequence)) as events:
            async for event in events:
                match event:
                    case InputTokens():
                        result.input_tokens = event.tokens
                    case Output():
                        result.text.append(event.text)
                        result.last = event
                        if event.token is not None and sequence.details.generated_tokens:
                            result.tokens.append(event.token)
        return result

    def _unary_response(
        self, text: str, request: Request, sequence: Sequence, result: _Result
    ) -> pb.GenerationResponse:
        last = result.last
        assert last is not None, "a generation ends with an output"
        is_empty = not last.num_generated  # expired before anything was computed: only the reason is told
        return pb.GenerationResponse(
            input_token_count=sequence.prompt_len,
            generated_token_count=last.num_generated,
            text=(text if request.input_text and not is_empty else "") + "".join(result.text),
            stop_reason=last.reason.name,
            stop_sequence=last.stop_sequence,
            seed=0 if is_empty else sequence.sampling.seed,
            tokens=self._token_infos(result.tokens, sequence.details),
            input_tokens=self._token_infos(result.input_tokens, sequence.details),
        )

    def _stream_response(self, output: Output, sequence: Sequence) -> pb.GenerationResponse | None:
        """None for a token that shows nothing: no text yet, and nobody asked for tokens."""
        is_last = output.reason is not StopReason.NOT_FINISHED
        if not is_last and not output.text and not sequence.details.generated_tokens:
            return None
        tokens = [output.token] if output.token is not None and sequence.details.generated_tokens else []
        return pb.GenerationResponse(
            generated_token_count=output.num_generated,
            text=output.text,
            stop_reason=output.reason.name,
            stop_sequence=output.stop_sequence,
            seed=sequence.sampling.seed if is_last and output.num_generated else 0,
            tokens=self._token_infos(tokens, sequence.details),
        )

    def _token_infos(self, tokens: Iterable[TokenDetail], details: Details) -> list[pb.TokenInfo]:
        return [
            pb.TokenInfo(
                text=self._tokenizer.piece(token.token_id),
                logprob=token.logprob,
                rank=token.rank,
                top_tokens=self._top_tokens(token, details.logprobs),
            )
            for token in tokens
        ]

    def _top_tokens(self, token: TokenDetail, with_logprobs: bool) -> list[pb.TokenInfo.TopToken]:
        """By probability where that is shown, else by token id."""
        top = token.top_tokens if with_logprobs else sorted(token.top_tokens)
        return [
            pb.TokenInfo.TopToken(
                text=self._tokenizer.piece(token_id), logprob=logprob if with_logprobs else 0.0
            )
            for token_id, logprob in top
        ]

    def _count_success(self, kind: str, started: float, last: Output | None) -> None:
        assert last is not None
        self._metrics.request_success.add(last.reason.name, kind)
        self._metrics.request_duration.observe(time.monotonic() - started)


def _error(failed: Failed) -> RouterError:
    error = RouterError(failed.message)
    error.code = failed.code
    return error
