"""Provides the service behind all APIs, which convert their protocols to its plain values. It admits,
validates and generates calls, and accounts for them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tgis.router.api.tenants import TenantRules
from tgis.router.engine.handle import CallName, ClaimId, EngineHandle, EngineInfo, LimitedWork, SequenceSpec
from tgis.router.errors import RequestError
from tgis.router.events import Ended, Failure, InputTokens, Output
from tgis.router.requests.accounting import Accounting, CallAccount, Record
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import GenerationCall, Metadata
from tgis.router.requests.validation import Validator
from tgis.router.scheduling.cache_events import CacheListener
from tgis.router.sequence import Details, StopReason, TokenDetail
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import NoText, StopSequences, TextStream
from tgis.router.text.tokenization import TokenizeJob
from tgis.router.text.tokenizer import Tokenizer

MAX_TOKENS_PER_OUTPUT = 256
"""Maximum token entries, alternatives included, in one non-final message. The limit keeps messages to slow
clients short, and lets other calls run between messages."""


class ModelInfo(NamedTuple):
    is_encoder_decoder: bool
    max_sequence_length: int
    max_new_tokens: int


@dataclass
class Result:
    """Result of a whole generation."""

    spec: SequenceSpec
    texts: list[str] = field(default_factory=list)
    """Texts shown with each token, and the remaining text if the generation ends between tokens."""
    tokens: list[TokenDetail] = field(default_factory=list)
    """Details of the tokens, if the call asked for them."""
    input_tokens: tuple[TokenDetail, ...] = ()
    last: Output | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_finished(self) -> bool:
        return self.last is not None and self.last.reason is not StopReason.NOT_FINISHED

    def add(self, output: InputTokens | Output) -> None:
        if isinstance(output, InputTokens):
            self.input_tokens = output.tokens
            return
        self.texts += output.texts
        self.last = output
        self.token_ids += [token.token_id for token in output.tokens]
        if self.spec.details.generated_tokens:
            self.tokens += output.tokens


Outputs = AsyncGenerator[InputTokens | Output, None]


class Stream(NamedTuple):
    spec: SequenceSpec
    outputs: Outputs


class _Admitted(NamedTuple):
    """Validated call with its claim to the engine."""

    account: CallAccount
    claim_id: ClaimId
    specs: list[SequenceSpec]
    make_text: Callable[[], TextStream | NoText]
    """Creates the sink for the tokens of one text."""
    deadline: float | None
    """Time on the monotonic clock at which the client stops waiting."""


class GenerationService:
    def __init__(
        self,
        engine: EngineHandle,
        validator: Validator,
        tokenizer: Tokenizer,
        vocabulary: Callable[[bool, frozenset[int]], Vocabulary],
        accounting: Accounting,
        rules_of: Callable[[str], TenantRules] = lambda tenant: TenantRules(),
    ) -> None:
        """Create the service. `vocabulary` returns the vocabulary for texts, given True if they continue
        their input, and the special tokens that they show. `rules_of` returns a tenant's rules."""
        self._engine = engine
        self._validator = validator
        self._accounting = accounting
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._rules_of = rules_of
        self._num_admitted = 0
        self.is_idle = asyncio.Event()
        """Set while no generation call is admitted."""
        self.is_idle.set()

    @property
    def engine_info(self) -> EngineInfo:
        return self._engine.info()

    @property
    def is_encoder_decoder(self) -> bool:
        return self.engine_info.is_encoder_decoder

    def vocabulary_of(self, call: GenerationCall) -> Vocabulary:
        """Return the vocabulary for a call's texts."""
        return self._vocabulary(not self.is_encoder_decoder, call.shown_special_ids)

    async def generate(self, call: GenerationCall) -> list[Result]:
        """Generate `n` results for each text of a call, ordered by text. Raises RouterError."""
        with self._accounting.open(call) as account:
            if not call.texts and not call.refusal:
                return []
            async with self._admit(call, account) as admitted:
                results = await self._collect_all(admitted)
            n = call.parameters.n
            for index, result in enumerate(results):
                result.input_tokens = results[index - index % n].input_tokens  # only the first result has any
            return results

    @asynccontextmanager
    async def stream(self, call: GenerationCall) -> AsyncIterator[list[Stream]]:
        """Admit a call, and generate while the context is open. Yield `n` streams for each text, ordered by
        text. An exception that leaves the context ends the call. The context and the outputs raise
        RouterError."""
        with self._accounting.open(call) as account:
            async with self._admit(call, account) as admitted, AsyncExitStack() as opened:
                yield [
                    Stream(spec, await opened.enter_async_context(self._outputs(admitted, index)))
                    for index, spec in enumerate(admitted.specs)
                ]

    async def load_adapter(self, adapter_id: str, request_id: str) -> None:
        """Load a LoRA adapter on all shards, so that its first call need not wait. Raises RouterError."""
        claim_id = await self._engine.acquire(0)
        try:
            await self._engine.lease(claim_id, None, adapter_id, request_id)
        finally:
            self._engine.release(claim_id)

    def watch_cache(self, listener: CacheListener | None) -> None:
        """Report changes of the engine's prefix cache to a listener, or to none."""
        self._engine.watch_cache(listener)

    def watch_aborts(self, listener: Callable[[CallName], object]) -> None:
        """Call `listener` for each call that a client of another router worker aborts."""
        self._engine.watch_aborts(listener)

    async def abort_elsewhere(self, name: CallName) -> bool:
        """Abort the calls with a name that other router workers serve. Return False if there are none. Raises
        UnavailableError."""
        return await self._engine.abort_elsewhere(name)

    def flush_cache(self) -> None:
        """Forget all cached prompts. Running generations are not affected."""
        self._engine.flush_cache()

    async def tokenize(
        self, job: TokenizeJob, api: ApiRules, metadata: Metadata, connection: Hashable, refusal: str = ""
    ) -> bytes:
        """Return the job's serialized answer. A `refusal` is the reason why the API cannot read the call.
        Raises RouterError."""
        started_at = time.monotonic()
        metrics = self._accounting.metrics
        metrics.tokenize_count.add()
        metrics.tokenize_input_count.add(amount=job.num_texts)
        with (
            self._accounting.tracing.call(api, job.method, metadata),
            self._accounting.counting_refusals(job.method, api),
        ):
            claim_id = await self._engine.acquire(1, LimitedWork.TOKENIZATION)
            try:
                if refusal:
                    raise RequestError(refusal)
                response, num_tokens = await self._tokenizer.tokenize(job, connection)
            finally:
                self._engine.release(claim_id)
        metrics.tokenize_tokens.observe(num_tokens)
        metrics.tokenize_duration.observe(time.monotonic() - started_at)
        return response

    def model_info(self, api: ApiRules, metadata: Metadata, refusal: str) -> ModelInfo:
        """Return facts about the model. Raises RequestError with a `refusal`."""
        limits = self._validator.limits
        accounting = self._accounting
        method = "ModelInfo"
        with accounting.tracing.call(api, method, metadata), accounting.counting_refusals(method, api):
            if refusal:
                raise RequestError(refusal)
            return ModelInfo(
                self.is_encoder_decoder, limits.max_sequence_length, limits.max_new_tokens_for(api)
            )

    @asynccontextmanager
    async def _admit(self, call: GenerationCall, account: CallAccount) -> AsyncIterator[_Admitted]:
        """Acquire a call's resources in the engine, validate the call, and release the resources at the
        end."""
        deadline = None if call.time_left_s is None else time.monotonic() + call.time_left_s
        engine = self._engine
        validator = self._validator
        rules = self._rules_of(call.tenant)
        name = CallName(call.tenant, call.client_id) if call.client_id else None
        limits = rules.limits(call.tenant)
        claim_id = await engine.acquire(validator.count_outputs(call), name=name, limits=limits)
        self._num_admitted += 1
        self.is_idle.clear()
        try:
            if call.refusal:
                raise RequestError(call.refusal)
            spec, stops, constraint = validator.check(call)
            grammar = await validator.compile(call, constraint)
            request_id = account.request_id
            adapters = await engine.lease(claim_id, call.prefix_id, call.adapter_id, request_id)
            priority = max(call.parameters.priority, rules.priority_floor)
            spec = spec._replace(grammar=grammar, adapters=adapters, request_id=request_id, priority=priority)
            specs = await validator.specs(call, spec)
            account.accept(spec.stopping.max_new_tokens, specs)
            yield _Admitted(account, claim_id, specs, self._text_maker(call, stops), deadline)
        finally:
            engine.release(claim_id)
            self._num_admitted -= 1
            if not self._num_admitted:
                self.is_idle.set()

    def _text_maker(self, call: GenerationCall, stops: StopSequences) -> Callable[[], TextStream | NoText]:
        if call.api.returns_texts or stops.texts or self._accounting.log_text_chars:
            return partial(TextStream, self.vocabulary_of(call), stops, call.make_stop_scope)
        return NoText

    @asynccontextmanager
    async def _outputs(self, admitted: _Admitted, index: int) -> AsyncIterator[Outputs]:
        """Account for one text, and generate it while the context is open, from the first read on."""
        with admitted.account.input(index, admitted.specs[index]) as record:
            async with aclosing(self._generate(admitted, index, record)) as outputs:
                yield outputs

    async def _generate(self, admitted: _Admitted, index: int, record: Record) -> Outputs:
        engine = self._engine
        spec = admitted.specs[index]
        text = admitted.make_text()
        sequence_id = engine.open(admitted.claim_id, spec, text)
        event_lists = engine.events(sequence_id)
        timer = _call_at(admitted.deadline, partial(engine.cancel, sequence_id))
        num_generated = 0
        max_tokens = _max_tokens(spec.details)
        try:
            async for events in event_lists:
                if len(events) == 1 and isinstance(token := events[0], TokenDetail):  # the common case
                    num_generated += 1
                    yield record(Output(text.take(1), (token,), num_generated))
                    continue
                tokens = tuple([event for event in events if isinstance(event, TokenDetail)])
                first, last = events[0], events[-1]
                if isinstance(first, InputTokens):
                    yield record(first)
                while len(tokens) > max_tokens:
                    chunk, tokens = tokens[:max_tokens], tokens[max_tokens:]
                    num_generated += max_tokens
                    yield record(Output(text.take(max_tokens), chunk, num_generated))
                    await asyncio.sleep(0)
                num_generated += len(tokens)
                if isinstance(last, Ended):
                    yield record(_last_output(tokens, last, text))
                    continue
                if tokens:
                    yield record(Output(text.take(len(tokens)), tokens, num_generated))
                if isinstance(last, Failure):
                    record(last)
        finally:
            if timer is not None:
                timer.cancel()
            engine.cancel(sequence_id)

    async def _collect_all(self, admitted: _Admitted) -> list[Result]:
        """Collect all generations. The first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._collect(admitted, index)) for index in range(len(admitted.specs))
                ]
        except ExceptionGroup as failures:
            failures.__traceback__ = None  # a frame of asyncio in this traceback holds the group
            failure = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise failure  # outside of `except`, which would chain it to the group that holds it

    async def _collect(self, admitted: _Admitted, index: int) -> Result:
        result = Result(admitted.specs[index])
        async with self._outputs(admitted, index) as outputs:
            async for output in outputs:
                result.add(output)
        return result


def _call_at(deadline: float | None, callback: Callable[[], object]) -> asyncio.TimerHandle | None:
    """Call `callback` at a time on the monotonic clock: at once if that has passed, never if it is None.

    The protocol ends a call whose deadline has passed, but the end reaches the call's task some turns of the
    event loop later, in which the engine could start its sequences."""
    if deadline is None:
        return None
    delay_s = deadline - time.monotonic()
    if delay_s <= 0:
        callback()
        return None
    return asyncio.get_running_loop().call_later(delay_s, callback)


def _max_tokens(details: Details) -> int:
    """Return the maximum number of tokens in an output."""
    return (
        max(MAX_TOKENS_PER_OUTPUT // (1 + details.top_n), 1)
        if details.generated_tokens
        else MAX_TOKENS_PER_OUTPUT
    )


def _last_output(tokens: tuple[TokenDetail, ...], end: Ended, text: TextStream | NoText) -> Output:
    """Return the output for the last event and the tokens right before it."""
    token, num_generated, reason, timings, num_cached = end
    if token is None:
        texts = (*text.take(len(tokens)), text.flush())
    else:
        tokens = (*tokens, token)
        texts = text.take(len(tokens))
    return Output(texts, tokens, num_generated, reason, text.stop_sequence, timings, num_cached)
