"""Handle of an engine in the same process."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from tgis.router.engine.claims import Claim, Claims
from tgis.router.engine.event_queue import EventQueue, WakeUps
from tgis.router.engine.handle import (
    EngineInfo,
    Lease,
    LimitedWork,
    Resume,
    SequenceId,
    SequenceSpec,
    TextSink,
    Ticket,
)
from tgis.router.engine.live_request import LiveRequest
from tgis.router.events import Event


@dataclass(eq=False)
class _Held:
    claim: Claim
    sequences: list[SequenceId] = field(default_factory=list)


class LocalHandle:
    """Implements EngineHandle over the claims."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._held: dict[Ticket, _Held] = {}
        self._opened: dict[SequenceId, tuple[LiveRequest, EventQueue]] = {}
        self._numbers, self._wake_ups = count(), WakeUps()

    def info(self) -> EngineInfo:
        return self._claims.info()

    async def acquire(self, count: int, work: LimitedWork = LimitedWork.GENERATION) -> Ticket:
        claim, ticket = self._claims.acquire(count, work), Ticket(next(self._numbers))
        self._held[ticket] = _Held(claim)
        return ticket

    async def lease(
        self, ticket: Ticket, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> Lease:
        return await self._claims.lease(self._held[ticket].claim, prefix_id, adapter_id, request_id)

    async def adapter_names(self) -> Mapping[str, str]:
        return self._claims.names.ids

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        self._claims.names.assign(name, adapter_id, is_replacing)

    async def take_name(self, name: str) -> None:
        self._claims.names.remove(name)

    def open(
        self, ticket: Ticket, spec: SequenceSpec, sink: TextSink | None, resume: Resume | None = None
    ) -> SequenceId:
        held, sequence_id = self._held[ticket], SequenceId(next(self._numbers))
        events = EventQueue(self._wake_ups.wake)
        live = self._claims.open(held.claim, spec, sink, resume, events)
        self._opened[sequence_id] = live, events
        held.sequences.append(sequence_id)
        return sequence_id

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        _, events = self._opened[sequence_id]
        return events

    def cancel(self, sequence_id: SequenceId) -> None:
        if (opened := self._opened.pop(sequence_id, None)) is not None:
            self._claims.cancel(opened[0])

    def release(self, ticket: Ticket) -> None:
        if (held := self._held.pop(ticket, None)) is not None:
            for sequence_id in held.sequences:
                self._opened.pop(sequence_id, None)
            self._claims.release(held.claim)
