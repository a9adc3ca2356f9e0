"""The door's half of an engine in another process: a second implementation of the seam between doors and
engine. Tickets and sequences have the door's numbers, so that a call which is cancelled before an answer can
still give them back: the other half reads messages in order."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tgis.router.engine.event_queue import EventQueue
from tgis.router.engine.handle import EngineInfo, Lease, Resume, SequenceId, SequenceSpec, TextSink, Ticket
from tgis.router.events import Ended, Event, Failed, TimedOut, TokenDetail
from tgis.router.sequence import StopReason

HEADER_BYTES = 4


def pack(message: tuple[Any, ...]) -> bytes:
    body = pickle.dumps(message)
    return len(body).to_bytes(HEADER_BYTES) + body


async def unpack(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    """Raises IncompleteReadError at the end."""
    size = int.from_bytes(await reader.readexactly(HEADER_BYTES))
    message: tuple[Any, ...] = pickle.loads(await reader.readexactly(size))  # noqa: S301
    return message


@dataclass(eq=False)
class Opened:
    """An opened sequence, and its events that have arrived."""

    sink: TextSink | None
    num_tokens: int
    events: EventQueue = field(default_factory=EventQueue)
    is_over: bool = False
    stop: TokenDetail | None = None
    """Token with which a stop sequence has ended it here."""


class SplitHandle:
    """Implements EngineHandle over `send`, which takes messages for the other half."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send, self._numbers = send, count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.opened: dict[SequenceId, Opened] = {}
        self.engine_info: EngineInfo | None = None

    def info(self) -> EngineInfo:
        assert self.engine_info is not None
        return self.engine_info

    async def acquire(self, count: int) -> Ticket:
        ticket = Ticket(next(self._numbers))
        try:
            await self._ask("acquire", ticket, count)
        except BaseException:
            self.release(ticket)
            raise
        return ticket

    async def lease(
        self, ticket: Ticket, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> Lease:
        lease: Lease = await self._ask("lease", ticket, prefix_id, adapter_id, request_id)
        return lease

    def open(
        self, ticket: Ticket, spec: SequenceSpec, sink: TextSink | None, resume: Resume | None = None
    ) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        self.opened[sequence_id] = Opened(sink, 0 if resume is None else len(resume.generated))
        self._send("open", ticket, sequence_id, spec, resume)
        return sequence_id

    async def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        opened = self.opened[sequence_id]
        async for arrived in opened.events:
            events = [self._read(sequence_id, opened, event) for event in arrived]
            if known := [event for event in events if event is not None]:
                yield known

    def _read(self, sequence_id: SequenceId, opened: Opened, event: Event) -> Event | None:
        """Tell the sink of a token. Return the event for the door; None if it comes after the end here."""
        if isinstance(event, TokenDetail):
            if opened.stop is not None:
                return None
            opened.num_tokens += 1
            if _push(opened.sink, event, StopReason.NOT_FINISHED):
                opened.stop = event
                self._send("cancel", sequence_id, opened.num_tokens)
                return None
        elif isinstance(event, Ended):
            if opened.stop is not None:  # whatever ended it elsewhere, meanwhile
                num_kept, reason = opened.num_tokens, StopReason.STOP_SEQUENCE
                return event._replace(token=opened.stop, num_generated=num_kept, reason=reason)
            if event.token is not None:
                _push(opened.sink, event.token, event.reason)
        return event

    def cancel(self, sequence_id: SequenceId, keep: int | None = None) -> None:
        if keep is None and self.opened.pop(sequence_id, None) is None:
            return
        self._send("cancel", sequence_id, keep)

    def release(self, ticket: Ticket) -> None:
        self._send("release", ticket)

    def take(self, kind: str, number: int, value: Any) -> None:
        """Take in a message of the other half: an event, or the answer to what was asked."""
        if kind == "event":
            if (opened := self.opened.get(SequenceId(number))) is not None:
                opened.events.deliver(value)
                opened.is_over = isinstance(value, Ended | Failed | TimedOut)
        elif (answer := self._answers.pop(number, None)) is not None and not answer.done():
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

    async def _ask(self, kind: str, ticket: Ticket, *values: Any) -> Any:
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        self._send(kind, ticket, *values)
        try:
            return await answer
        finally:
            self._answers.pop(ticket, None)


def _push(sink: TextSink | None, token: TokenDetail, reason: StopReason) -> bool:
    return sink is not None and sink.push(token.token_id, reason)
