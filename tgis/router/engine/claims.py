"""Manages the claims of calls to concurrency, adapters and sequences, from acquisition to release, and gives
the APIs in the same process a handle for them."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

from tgis.pb import shard_pb2
from tgis.router.adapters.names import AdapterNames
from tgis.router.adapters.registry import AdapterRegistry
from tgis.router.engine.engine import Engine, lost_adapter
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
from tgis.router.engine.live_request import CallStart, EventQueue, EventReceiver, LiveRequest, WakeUps
from tgis.router.engine.tenant_limits import TenantLimiter, TenantUse
from tgis.router.errors import OVERLOADED, OverloadedError
from tgis.router.events import Event
from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.scheduling.cache_events import CacheListener, CacheRecorder
from tgis.router.sequence import CallAdapters, Sequence, Siblings


def is_encoder_decoder(info: shard_pb2.InfoResponse) -> bool:
    return info.model_kind == shard_pb2.InfoResponse.MODEL_KIND_ENCODER_DECODER


class ConcurrencyLimit:
    """Limit on concurrent inputs. It admits all inputs of a call or refuses the call; no call waits."""

    def __init__(self, limit: int) -> None:
        self.num_free = self.limit = limit
        self.resource_count = ResourceCount()

    @property
    def num_used(self) -> int:
        return self.limit - self.num_free

    @contextmanager
    def acquire(self, count: int, is_again: bool = False) -> Iterator[None]:
        """Admit `count` inputs while the context is open. With `is_again`, ignore the limit, because the call
        has been admitted before. Raises OverloadedError."""
        if count > max(self.num_free, 0) and not is_again:
            raise OverloadedError(OVERLOADED)
        self.num_free -= count
        self.resource_count.created += count
        try:
            yield
        finally:
            self.num_free += count
            self.resource_count.released += count


@dataclass(eq=False)
class Claim:
    resources: ExitStack
    tenant_use: TenantUse | None = None
    """Use of the call's tenant if it has limits."""
    adapters: CallAdapters = field(default_factory=CallAdapters)
    leasing: asyncio.Task[None] | None = None
    """Task that loads the claim's adapters for a router worker."""
    live: dict[SequenceId, LiveRequest] = field(default_factory=dict)
    start: CallStart = field(default_factory=CallStart)
    siblings: defaultdict[Hashable, Siblings] = field(default_factory=lambda: defaultdict(Siblings))
    """Siblings by input tokens and cache salt."""


class Claims:
    """Manager of claims. `attach` must be called before sequences are opened."""

    def __init__(
        self, concurrency: Mapping[LimitedWork, ConcurrencyLimit], adapters: AdapterRegistry
    ) -> None:
        self._concurrency = concurrency
        self._adapters = adapters
        self._engine: Engine | None = None
        self._tenants = TenantLimiter()
        self.names = AdapterNames()

    def attach(self, engine: Engine, info: shard_pb2.InfoResponse) -> None:
        self._engine = engine
        self._pad_token_id = info.pad_token_id
        self._start_token_id = info.decoder_start_token_id
        self._info = EngineInfo(
            is_encoder_decoder(info),
            info.vocab_size,
            frozenset(info.eos_token_ids),
            tuple(info.preloaded_adapter_ids),
            info.num_blocks * info.block_size,
        )

    def info(self) -> EngineInfo:
        return self._info

    def acquire(
        self, count: int, work: LimitedWork, limits: TenantLimits = NO_LIMITS, is_again: bool = False
    ) -> Claim:
        """Reserve concurrency for a call. With `is_again`, ignore all limits, because a lost engine process
        has already admitted the call. Raises OverloadedError."""
        _, *maxima = limits
        use = self._tenants.check(limits, count) if any(maxima) else None  # most tenants have no limit
        with ExitStack() as resources:
            resources.enter_context(self._concurrency[work].acquire(count, is_again))
            if use is not None:
                resources.enter_context(use.call(count))
            return Claim(resources.pop_all(), use)

    async def lease(
        self, claim: Claim, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        """Load the adapters with these ids, if there are any. Raises RouterError."""
        if prefix_id is None and adapter_id is None:
            return claim.adapters
        lease = claim.resources.enter_context(self._adapters.lease(prefix_id, adapter_id, request_id))
        claim.adapters = await lease.take()
        return claim.adapters

    async def lease_again(
        self, claim: Claim, prefix_id: str | None, adapter_id: str | None, adapters: CallAdapters
    ) -> None:
        """Load the adapters that a call used in a lost engine process, even if the ids refer to different
        adapters now. Raises RouterError and AdapterCallError."""
        lease = claim.resources.enter_context(self._adapters.lease(prefix_id, adapter_id, ""))
        claim.adapters = await lease.take_again(adapters)

    def open(
        self,
        claim: Claim,
        sequence_id: SequenceId,
        spec: SequenceSpec,
        sink: TextSink | None,
        progress: Progress | None,
        events: EventReceiver,
    ) -> LiveRequest:
        """Start a generation. It may deliver events before this method returns."""
        assert self._engine is not None, "nothing is opened before the engine has started"
        live = LiveRequest(self._sequence(spec, claim), sink, events, call_start=claim.start)
        if progress is not None:
            live.resume(progress)
        claim.live[sequence_id] = live
        if claim.tenant_use is not None:
            claim.tenant_use.begin(live)
        if claim.adapters.digests == spec.adapters.digests:
            self._engine.open(live)
        else:  # An id refers to a different adapter now, or the adapter could not be loaded again.
            events.deliver(lost_adapter(spec.request_id))
        return live

    def cancel(self, live: LiveRequest) -> None:
        """End a generation without a final event. Do nothing if it has ended."""
        assert self._engine is not None
        self._engine.cancel(live)

    @property
    def cache_recorder(self) -> CacheRecorder:
        assert self._engine is not None, "the cache belongs to a started engine"
        return self._engine.cache_recorder

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        assert self._engine is not None
        self._engine.scheduler.pool.forget()

    def release(self, claim: Claim) -> None:
        for live in claim.live.values():
            self.cancel(live)
        if claim.tenant_use is not None:
            claim.tenant_use.end(claim.live.values())
        claim.resources.close()

    def _sequence(self, spec: SequenceSpec, claim: Claim) -> Sequence:
        """Return a new sequence, with padding at the positions of virtual tokens."""
        adapters = claim.adapters
        token_ids = [self._pad_token_id] * adapters.num_decoder_tokens
        encoder_token_ids: tuple[int, ...] = ()
        if self._info.is_encoder_decoder:
            token_ids.append(self._start_token_id)
            encoder_token_ids = (self._pad_token_id,) * adapters.num_encoder_tokens + spec.input_ids
        else:
            token_ids += spec.input_ids
        return Sequence(
            token_ids,
            spec.stopping,
            spec.sampling,
            spec.details,
            spec.grammar,
            spec.request_id,
            adapters,
            encoder_token_ids,
            spec.cache_salt,
            claim.siblings[spec.input_ids, spec.cache_salt],
            spec.priority,
        )


class LocalHandle:
    """EngineHandle that calls the claims directly."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._open_claims: dict[ClaimId, Claim] = {}
        self._generations: dict[SequenceId, tuple[LiveRequest, EventQueue]] = {}
        self._numbers = count()
        self._wake_ups = WakeUps()
        self._cache_listener: CacheListener | None = None

    def info(self) -> EngineInfo:
        return self._claims.info()

    async def acquire(
        self,
        count: int,
        work: LimitedWork = LimitedWork.GENERATION,
        name: CallName | None = None,
        limits: TenantLimits = NO_LIMITS,
    ) -> ClaimId:
        claim = self._claims.acquire(count, work, limits)
        claim_id = ClaimId(next(self._numbers))
        self._open_claims[claim_id] = claim
        return claim_id

    async def lease(
        self, claim_id: ClaimId, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        return await self._claims.lease(self._open_claims[claim_id], prefix_id, adapter_id, request_id)

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
        live = self._claims.open(self._open_claims[claim_id], sequence_id, spec, sink, progress, events)
        self._generations[sequence_id] = live, events
        return sequence_id

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        _, events = self._generations[sequence_id]
        return events

    def cancel(self, sequence_id: SequenceId) -> None:
        live, _ = self._generations.pop(sequence_id, (None, None))
        if live is not None:
            self._claims.cancel(live)

    def watch_cache(self, listener: CacheListener | None) -> None:
        recorder = self._claims.cache_recorder
        if self._cache_listener is not None:
            recorder.discard(self._cache_listener)
        self._cache_listener = listener
        if listener is not None:
            recorder.add(listener)

    def watch_aborts(self, listener: Callable[[CallName], object]) -> None:
        """Do nothing, because there are no other workers."""

    async def abort_elsewhere(self, name: CallName) -> bool:
        return False

    def flush_cache(self) -> None:
        self._claims.flush_cache()

    def release(self, claim_id: ClaimId) -> None:
        if (claim := self._open_claims.pop(claim_id, None)) is not None:
            for sequence_id in claim.live:
                self._generations.pop(sequence_id, None)
            self._claims.release(claim)
