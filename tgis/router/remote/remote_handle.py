"""Worker's half of a handle whose engine is in another process. It keeps the state that continues every call
with the next engine process: the call's claim, its unanswered question, and its tokens so far."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from tgis.router.engine.handle import (
    NO_LIMITS,
    CallName,
    ClaimId,
    EngineInfo,
    LimitedWork,
    Progress,
    SequenceId,
    SequenceSpec,
    TenantLimits,
    TextSink,
)
from tgis.router.engine.live_request import EventQueue, WakeUps
from tgis.router.errors import UnavailableError
from tgis.router.events import Ended, Event, Failed, InputTokens
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote import messages as wire
from tgis.router.remote.names import NamesCopy
from tgis.router.scheduling.cache_events import CacheListener
from tgis.router.sequence import CallAdapters, StopReason, TokenDetail

_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it
NO_ADAPTERS = CallAdapters()


@dataclass(eq=False)
class _OpenSequence:
    """Sequence without a final event, and everything that the next engine process needs of it."""

    message: wire.Open
    """Message that opens it, with its progress so far."""
    sink: TextSink | None
    events: EventQueue
    expiry: asyncio.TimerHandle | None = None
    """Timer of its deadline while there is no engine; otherwise the engine has one."""


class RemoteHandle:
    """`EngineHandle` of an engine in another process. `info` must not be called before `attach`."""

    def __init__(self, metrics: Metrics) -> None:
        self._timeouts = metrics.request_failure
        self._send: Callable[[Any], None] = lambda message: None
        self._is_attached = False
        self._lost: Failed | None = None
        """Final event of all sequences while the engine is considered lost."""
        self._numbers = count()
        self._wake_ups = WakeUps()
        self._claims: dict[ClaimId, wire.WorkerClaim] = {}
        self._sequence_ids: dict[ClaimId, list[SequenceId]] = {}
        self._asked: dict[ClaimId, tuple[Any, asyncio.Future[Any]]] = {}
        """Unanswered questions, at most one per claim."""
        self._open: dict[SequenceId, _OpenSequence] = {}
        self._events: dict[SequenceId, EventQueue] = {}
        self._info: EngineInfo | None = None
        self._cache_listener: CacheListener | None = None
        self._abort: Callable[[CallName], object] = lambda name: None
        self._names = NamesCopy()
        """Copy of the adapter names."""
        self._is_current = asyncio.Event()
        """Set if the copy is current, or if there is no engine to wait for."""
        self._take: dict[type, Callable[[Any], None]] = {
            wire.Tokens: self._take_tokens,
            wire.Finished: self._take_final,
            wire.Begun: self._take_times,
            wire.Inputs: self._take_inputs,
            wire.Acquired: self._take_answer,
            wire.Leased: self._take_answer,
            wire.Abort: self._take_abort,
            wire.AbortAsked: self._take_answer,
            wire.Refused: self._take_answer,
            wire.Named: self._take_answer,
            wire.Names: self._take_names,
            wire.NameChanged: self._take_names,
            wire.CacheChanged: self._take_cache_changes,
        }

    @property
    def num_live(self) -> int:
        """Number of opened sequences without a final event."""
        return len(self._open)

    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    async def acquire(
        self,
        count: int,
        work: LimitedWork = LimitedWork.GENERATION,
        name: CallName | None = None,
        limits: TenantLimits = NO_LIMITS,
    ) -> ClaimId:
        claim_id = ClaimId(next(self._numbers))
        try:
            await self._ask(claim_id, wire.Acquire(claim_id, work, count, name, limits))
        except BaseException:  # the engine may have the claim; otherwise it ignores the message
            self._send(wire.Release(claim_id))
            raise
        self._claims[claim_id] = wire.WorkerClaim(claim_id, work, count, name=name)
        self._sequence_ids[claim_id] = []
        return claim_id

    async def lease(
        self, claim_id: ClaimId, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        if prefix_id is None and not adapter_id:
            return NO_ADAPTERS
        ids = wire.AdapterIds(prefix_id, adapter_id, request_id)
        answer = await self._ask(claim_id, wire.TakeLease(claim_id, ids))
        assert isinstance(answer, wire.Leased)
        claim = self._claims[claim_id]
        self._claims[claim_id] = msgspec.structs.replace(claim, ids=ids, adapters=answer.adapters)
        return answer.adapters

    async def adapter_names(self) -> Mapping[str, str]:
        await self._is_current.wait()
        return self._names.names.ids

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        claim_id = ClaimId(next(self._numbers))
        await self._ask(claim_id, wire.ChangeName(claim_id, name, adapter_id, is_replacing))

    async def take_name(self, name: str) -> None:
        claim_id = ClaimId(next(self._numbers))
        await self._ask(claim_id, wire.ChangeName(claim_id, name, None))

    def open(
        self,
        claim_id: ClaimId,
        spec: SequenceSpec,
        sink: TextSink | None,
        progress: Progress | None = None,
    ) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        message = wire.Open(claim_id, sequence_id, spec, progress or Progress())
        opened = _OpenSequence(message, sink, EventQueue(self._wake_ups.wake))
        self._sequence_ids[claim_id].append(sequence_id)
        self._open[sequence_id] = opened
        self._events[sequence_id] = opened.events
        if self._lost is not None:
            self._end(opened, self._lost)
        elif self._is_attached:
            self._send(message)
        else:
            self._watch_deadline(opened)
        return sequence_id

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        return self._events[sequence_id]

    def cancel(self, sequence_id: SequenceId) -> None:
        self._events.pop(sequence_id, None)
        if self._open.pop(sequence_id, None) is not None:
            self._send(wire.Cancel(sequence_id))

    def watch_cache(self, listener: CacheListener | None) -> None:
        self._cache_listener = listener
        if self._is_attached:
            self._send(wire.WatchCache(listener is not None))

    def watch_aborts(self, listener: Callable[[CallName], object]) -> None:
        self._abort = listener

    async def abort_elsewhere(self, name: CallName) -> bool:
        claim_id = ClaimId(next(self._numbers))
        answer = await self._ask(claim_id, wire.AskAbort(claim_id, name))
        return bool(answer.is_found)

    def flush_cache(self) -> None:
        if self._is_attached:  # the cache of the next engine is empty
            self._send(wire.FlushCache())

    def release(self, claim_id: ClaimId) -> None:
        if self._claims.pop(claim_id, None) is not None:
            self._send(wire.Release(claim_id))
            for sequence_id in self._sequence_ids.pop(claim_id):
                self._open.pop(sequence_id, None)
                self._events.pop(sequence_id, None)

    def greet(self, worker: int, send: Callable[[Any], None]) -> None:
        """Use a new connection, and send this worker's claims as its first message. Questions and sequences
        wait for `attach`."""
        self._send = send
        self._is_attached = False
        names = self._names.names
        send(wire.Hello(worker, list(self._claims.values()), names.version, names.ids))

    def attach(self, info: EngineInfo) -> None:
        """Repeat unanswered questions and continue all sequences, because the engine has started."""
        self._info = info
        self._is_attached = True
        self._lost = None
        self._is_current.set()
        for message, _ in self._asked.values():
            is_change = isinstance(message, wire.ChangeName)
            self._send(msgspec.structs.replace(message, is_again=True) if is_change else message)
        for opened in self._open.values():
            if opened.expiry is not None:
                opened.expiry.cancel()
            self._send(opened.message)
        if self._cache_listener is not None:
            self._send(wire.WatchCache(True))

    def detach(self) -> None:
        """Stop sending until the next connection."""
        self._send = lambda message: None
        self._is_attached = False
        self._is_current.clear()
        for opened in self._open.values():
            self._watch_deadline(opened)

    def give_up(self, lost: Failed) -> None:
        """End all sequences and questions with this event, also new ones until `attach` is called."""
        self._lost = lost
        self._is_current.set()
        for opened in list(self._open.values()):
            self._end(opened, lost)
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(UnavailableError(lost.message))

    def take(self, message: Any) -> None:
        """Handle a message from the engine other than its state."""
        self._take[type(message)](message)

    async def _ask(self, claim_id: ClaimId, message: Any) -> Any:
        """Send a question, also to the next engine if this one is lost, and return the answer. Raises
        RouterError."""
        if self._lost is not None:
            raise UnavailableError(self._lost.message)
        answer = asyncio.get_running_loop().create_future()
        self._asked[claim_id] = message, answer
        try:
            if self._is_attached:
                self._send(message)
            return await answer
        finally:
            del self._asked[claim_id]

    def _take_cache_changes(self, message: wire.CacheChanged) -> None:
        if self._cache_listener is not None:
            self._cache_listener(message.changes)

    def _take_abort(self, message: wire.Abort) -> None:
        self._abort(message.name)

    def _take_names(self, message: wire.Names | wire.NameChanged) -> None:
        self._send(self._names.take(message))

    def _take_answer(
        self, message: wire.Acquired | wire.Leased | wire.Named | wire.AbortAsked | wire.Refused
    ) -> None:
        _, answer = self._asked.get(message.claim_id, (None, None))
        if answer is None or answer.done():
            return
        if isinstance(message, wire.Refused):
            answer.set_exception(wire.error_of(message))
        else:
            answer.set_result(message)

    def _take_times(self, message: wire.Begun) -> None:
        if (opened := self._open.get(message.sequence_id)) is not None:
            opened.message.progress.times = message.times

    def _take_inputs(self, message: wire.Inputs) -> None:
        if (opened := self._open.get(message.sequence_id)) is not None:
            opened.message.progress.has_inputs = True
            opened.events.deliver(InputTokens(tuple(message.tokens)))

    def _take_tokens(self, message: wire.Tokens) -> None:
        """Push a step's tokens, and end the sequences in which they complete a stop sequence. Ignore tokens
        of sequences that have ended here but not yet in the engine."""
        now = time.monotonic()
        for sequence_id, token in _tokens(message):
            opened = self._open.get(sequence_id)
            if opened is None:
                continue
            progress = opened.message.progress
            progress.generated.append(token.token_id)
            progress.times.last_token_at = now
            if opened.sink is not None and opened.sink.push(token.token_id, _NOT_FINISHED):
                self._stop(opened, token)
            else:
                opened.events.deliver(token)

    def _stop(self, opened: _OpenSequence, token: TokenDetail) -> None:
        self._end(opened, _ended(opened, token, StopReason.STOP_SEQUENCE))
        self._send(wire.Cancel(opened.message.sequence_id))

    def _take_final(self, message: wire.Finished) -> None:
        opened = self._open.get(message.sequence_id)
        if opened is None:
            return
        ended = message.ended
        if ended is not None and ended.token is not None and opened.sink is not None:
            opened.sink.push(ended.token.token_id, ended.reason)
        final = ended or message.failed or message.timed_out
        assert final is not None
        self._end(opened, final)

    def _watch_deadline(self, opened: _OpenSequence) -> None:
        """End a sequence at its deadline unless an engine is connected by then."""
        deadline = opened.message.spec.stopping.deadline
        if deadline is not None:
            delay = max(deadline - time.monotonic(), 0.0)
            opened.expiry = asyncio.get_running_loop().call_later(delay, self._expire, opened)

    def _expire(self, opened: _OpenSequence) -> None:
        if self._is_attached or opened.message.sequence_id not in self._open:
            return
        if opened.message.progress.times.started_at is None:
            self._timeouts.add("timeout")
        self._end(opened, _ended(opened, None, StopReason.TIME_LIMIT))

    def _end(self, opened: _OpenSequence, final: Event) -> None:
        del self._open[opened.message.sequence_id]
        opened.events.deliver(final)


def _ended(opened: _OpenSequence, token: TokenDetail | None, reason: StopReason) -> Ended:
    progress = opened.message.progress
    times = progress.times
    timings = times.timings(time.monotonic())
    return Ended(token, len(progress.generated), reason, timings, times.num_cached)


def _tokens(message: wire.Tokens) -> Iterable[tuple[SequenceId, TokenDetail]]:
    if not message.logprobs:
        return zip(message.sequence_ids, map(TokenDetail, message.token_ids), strict=True)
    return _detailed_tokens(message)


def _detailed_tokens(message: wire.Tokens) -> Iterator[tuple[SequenceId, TokenDetail]]:
    details = zip(message.token_ids, message.logprobs, message.ranks, message.top_tokens, strict=True)
    return zip(message.sequence_ids, map(TokenDetail._make, details), strict=True)
