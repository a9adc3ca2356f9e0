"""Implements the handle of an engine in the same process."""

from collections.abc import AsyncIterator, Mapping
from itertools import count

from tgis.router.engine.claims import Claim, Claims
from tgis.router.engine.event_queue import EventQueue, WakeUps
from tgis.router.engine.handle import (
    ClaimId,
    EngineInfo,
    LimitedWork,
    Progress,
    SequenceId,
    SequenceSpec,
    TextSink,
)
from tgis.router.engine.live_request import LiveRequest
from tgis.router.events import Event
from tgis.router.scheduling.cache_events import CacheListener
from tgis.router.sequence import CallAdapters


class LocalHandle:
    """EngineHandle that calls the claims directly."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._held: dict[ClaimId, Claim] = {}
        self._opened: dict[SequenceId, tuple[LiveRequest, EventQueue]] = {}
        self._numbers = count()
        self._wake_ups = WakeUps()
        self._cache_listener: CacheListener | None = None

    def info(self) -> EngineInfo:
        return self._claims.info()

    async def acquire(self, count: int, work: LimitedWork = LimitedWork.GENERATION) -> ClaimId:
        claim = self._claims.acquire(count, work)
        claim_id = ClaimId(next(self._numbers))
        self._held[claim_id] = claim
        return claim_id

    async def lease(
        self, claim_id: ClaimId, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        return await self._claims.lease(self._held[claim_id], prefix_id, adapter_id, request_id)

    async def adapter_names(self) -> Mapping[str, str]:
        return self._claims.names.ids

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        self._claims.names.assign(name, adapter_id, is_replacing)

    async def take_name(self, name: str) -> None:
        self._claims.names.remove(name)

    def open(
        self,
        claim_id: ClaimId,
        spec: SequenceSpec,
        sink: TextSink | None,
        progress: Progress | None = None,
    ) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        events = EventQueue(self._wake_ups.wake)
        live = self._claims.open(self._held[claim_id], sequence_id, spec, sink, progress, events)
        self._opened[sequence_id] = live, events
        return sequence_id

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        _, events = self._opened[sequence_id]
        return events

    def cancel(self, sequence_id: SequenceId) -> None:
        if (opened := self._opened.pop(sequence_id, None)) is not None:
            self._claims.cancel(opened[0])

    def watch_cache(self, listener: CacheListener | None) -> None:
        recorder = self._claims.cache_recorder
        if self._cache_listener is not None:
            recorder.discard(self._cache_listener)
        self._cache_listener = listener
        if listener is not None:
            recorder.add(listener)

    def flush_cache(self) -> None:
        self._claims.flush_cache()

    def release(self, claim_id: ClaimId) -> None:
        if (claim := self._held.pop(claim_id, None)) is not None:
            for sequence_id in claim.live:
                self._opened.pop(sequence_id, None)
            self._claims.release(claim)
