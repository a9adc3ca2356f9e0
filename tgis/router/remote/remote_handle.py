"""Worker's half of a handle whose engine is in another process. It keeps the state that continues every call
with the next engine process: the call's tickets, its unanswered questions, and its tokens so far."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from tgis.router.engine.event_queue import EventQueue, WakeUps
from tgis.router.engine.handle import (
    EngineInfo,
    Lease,
    LimitedWork,
    RequestTimes,
    Resume,
    SequenceId,
    SequenceSpec,
    TextSink,
    Ticket,
)
from tgis.router.errors import UnavailableError
from tgis.router.events import Ended, Event, Failed, InputTokens
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote import messages as wire
from tgis.router.remote.names import NamesCopy
from tgis.router.sequence import CallAdapters, StopReason, TokenDetail

_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it
NO_LEASE = Lease()


@dataclass(eq=False)
class _Held:
    """Resources of a ticket."""

    work: LimitedWork
    count: int
    ids: wire.AdapterIds = field(default_factory=wire.AdapterIds)
    adapters: CallAdapters = field(default_factory=CallAdapters)
    sequences: list[SequenceId] = field(default_factory=list)


@dataclass(eq=False)
class _OpenSequence:
    """State of a sequence without a final event."""

    sequence_id: SequenceId
    ticket: Ticket
    spec: SequenceSpec
    sink: TextSink | None
    generated: list[int]
    has_inputs: bool
    times: RequestTimes
    """Times that the engine has reported; the last report comes with the first token."""
    events: EventQueue
    last_token_at: float
    expiry: asyncio.TimerHandle | None = None
    """Timer of its deadline while there is no engine; otherwise the engine has one."""

    def resume(self) -> wire.Open:
        times = self.times._replace(last_token_at=self.last_token_at)
        resume = Resume(tuple(self.generated), self.has_inputs, times)
        return wire.Open(self.ticket, self.sequence_id, self.spec, resume)


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
        self._held: dict[Ticket, _Held] = {}
        self._asked: dict[Ticket, tuple[Any, asyncio.Future[Any]]] = {}
        """Unanswered questions, at most one per ticket."""
        self._open: dict[SequenceId, _OpenSequence] = {}
        self._events: dict[SequenceId, EventQueue] = {}
        self._info: EngineInfo | None = None
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
            wire.Refused: self._take_answer,
            wire.Named: self._take_answer,
            wire.Names: self._take_names,
            wire.NameChanged: self._take_names,
        }

    @property
    def num_live(self) -> int:
        """Number of opened sequences without a final event."""
        return len(self._open)

    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    async def acquire(self, count: int, work: LimitedWork = LimitedWork.GENERATION) -> Ticket:
        ticket = Ticket(next(self._numbers))
        try:
            await self._ask(ticket, wire.Acquire(ticket, work, count))
        except BaseException:  # the engine may have the ticket; otherwise it ignores the message
            self._send(wire.Release(ticket))
            raise
        self._held[ticket] = _Held(work, count)
        return ticket

    async def lease(
        self, ticket: Ticket, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> Lease:
        if prefix_id is None and not adapter_id:
            return NO_LEASE
        held = self._held[ticket]
        ids = wire.AdapterIds(prefix_id, adapter_id, request_id)
        answer = await self._ask(ticket, wire.TakeLease(ticket, ids))
        assert isinstance(answer, wire.Leased)
        held.ids = ids
        held.adapters = answer.adapters
        return answer.lease

    async def adapter_names(self) -> Mapping[str, str]:
        await self._is_current.wait()
        return self._names.names.ids

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        ticket = Ticket(next(self._numbers))
        await self._ask(ticket, wire.ChangeName(ticket, name, adapter_id, is_replacing))

    async def take_name(self, name: str) -> None:
        ticket = Ticket(next(self._numbers))
        await self._ask(ticket, wire.ChangeName(ticket, name, None))

    def open(
        self, ticket: Ticket, spec: SequenceSpec, sink: TextSink | None, resume: Resume | None = None
    ) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        generated, has_inputs, known = resume or ((), False, None)
        times = known or RequestTimes(time.monotonic())
        opened = _OpenSequence(
            sequence_id,
            ticket,
            spec,
            sink,
            [*generated],
            has_inputs,
            times,
            EventQueue(self._wake_ups.wake),
            times.last_token_at,
        )
        self._held[ticket].sequences.append(sequence_id)
        self._open[sequence_id] = opened
        self._events[sequence_id] = opened.events
        if self._lost is not None:
            self._end(opened, self._lost)
        elif self._is_attached:
            self._send(wire.Open(ticket, sequence_id, spec, resume))
        else:
            self._watch_deadline(opened)
        return sequence_id

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        return self._events[sequence_id]

    def cancel(self, sequence_id: SequenceId) -> None:
        self._events.pop(sequence_id, None)
        if self._open.pop(sequence_id, None) is not None:
            self._send(wire.Cancel(sequence_id))

    def release(self, ticket: Ticket) -> None:
        held = self._held.pop(ticket, None)
        if held is not None:
            self._send(wire.Release(ticket))
            for sequence_id in held.sequences:
                self._open.pop(sequence_id, None)
                self._events.pop(sequence_id, None)

    def greet(self, worker: int, send: Callable[[Any], None]) -> None:
        """Use a new connection, and send this worker's tickets as its first message. Questions and sequences
        wait for `attach`."""
        self._send = send
        self._is_attached = False
        tickets = [
            wire.HeldTicket(ticket, held.work, held.count, held.ids, held.adapters)
            for ticket, held in self._held.items()
        ]
        names = self._names.names
        send(wire.Hello(worker, tickets, names.version, names.ids))

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
            self._send(opened.resume())

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

    async def _ask(self, ticket: Ticket, message: Any) -> Any:
        """Send a question, also to the next engine if this one is lost, and return the answer. Raises
        RouterError."""
        if self._lost is not None:
            raise UnavailableError(self._lost.message)
        answer = asyncio.get_running_loop().create_future()
        self._asked[ticket] = message, answer
        try:
            if self._is_attached:
                self._send(message)
            return await answer
        finally:
            del self._asked[ticket]

    def _take_names(self, message: wire.Names | wire.NameChanged) -> None:
        self._send(self._names.take(message))

    def _take_answer(self, message: wire.Acquired | wire.Leased | wire.Named | wire.Refused) -> None:
        _, answer = self._asked.get(message.ticket, (None, None))
        if answer is None or answer.done():
            return
        if isinstance(message, wire.Refused):
            answer.set_exception(wire.error_of(message))
        else:
            answer.set_result(message)

    def _take_times(self, message: wire.Begun) -> None:
        if (opened := self._open.get(message.sequence_id)) is not None:
            opened.times = message.times

    def _take_inputs(self, message: wire.Inputs) -> None:
        if (opened := self._open.get(message.sequence_id)) is not None:
            opened.has_inputs = True
            opened.events.deliver(InputTokens(tuple(message.tokens)))

    def _take_tokens(self, message: wire.Tokens) -> None:
        """Push a step's tokens, and end the sequences in which they complete a stop sequence. Ignore tokens
        of sequences that have ended here but not yet in the engine."""
        now = time.monotonic()
        for sequence_id, token in _tokens(message):
            opened = self._open.get(sequence_id)
            if opened is None:
                continue
            opened.generated.append(token.token_id)
            opened.last_token_at = now
            if opened.sink is not None and opened.sink.push(token.token_id, _NOT_FINISHED):
                self._stop(opened, token)
            else:
                opened.events.deliver(token)

    def _stop(self, opened: _OpenSequence, token: TokenDetail) -> None:
        times = opened.times
        timings = times.timings(time.monotonic())
        num_generated = len(opened.generated)
        self._end(opened, Ended(token, num_generated, StopReason.STOP_SEQUENCE, timings, times.num_cached))
        self._send(wire.Cancel(opened.sequence_id))

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
        deadline = opened.spec.stopping.deadline
        if deadline is not None:
            delay = max(deadline - time.monotonic(), 0.0)
            opened.expiry = asyncio.get_running_loop().call_later(delay, self._expire, opened)

    def _expire(self, opened: _OpenSequence) -> None:
        if self._is_attached or opened.sequence_id not in self._open:
            return
        times = opened.times
        num_generated = len(opened.generated)
        if times.started_at is None:
            self._timeouts.add("timeout")
        timings = times.timings(time.monotonic())
        self._end(opened, Ended(None, num_generated, StopReason.TIME_LIMIT, timings, times.num_cached))

    def _end(self, opened: _OpenSequence, final: Event) -> None:
        del self._open[opened.sequence_id]
        opened.events.deliver(final)


def _tokens(message: wire.Tokens) -> Iterable[tuple[SequenceId, TokenDetail]]:
    if not message.logprobs:
        return zip(message.sequence_ids, map(TokenDetail, message.token_ids), strict=True)
    return _detailed_tokens(message)


def _detailed_tokens(message: wire.Tokens) -> Iterator[tuple[SequenceId, TokenDetail]]:
    details = zip(message.token_ids, message.logprobs, message.ranks, message.top_tokens, strict=True)
    return zip(message.sequence_ids, map(TokenDetail._make, details), strict=True)
