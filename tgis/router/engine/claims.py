"""Manages the claims of calls to concurrency, adapters and sequences, from acquisition to release."""

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from tgis.pb import shard_pb2
from tgis.router.adapters.names import AdapterNames
from tgis.router.adapters.registry import AdapterRegistry
from tgis.router.engine.concurrency import ConcurrencyLimit
from tgis.router.engine.engine import Engine, lost_adapter
from tgis.router.engine.event_queue import EventReceiver
from tgis.router.engine.handle import EngineInfo, LimitedWork, Progress, SequenceId, SequenceSpec, TextSink
from tgis.router.engine.live_request import LiveRequest
from tgis.router.sequence import CallAdapters, Sequence, Siblings


def is_encoder_decoder(info: shard_pb2.InfoResponse) -> bool:
    return info.model_kind == shard_pb2.InfoResponse.MODEL_KIND_ENCODER_DECODER


@dataclass(eq=False)
class Claim:
    resources: ExitStack
    adapters: CallAdapters = field(default_factory=CallAdapters)
    leasing: asyncio.Task[None] | None = None
    """Task that loads the claim's adapters for a router worker."""
    live: dict[SequenceId, LiveRequest] = field(default_factory=dict)
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
        )

    def info(self) -> EngineInfo:
        return self._info

    def acquire(self, count: int, work: LimitedWork, is_again: bool = False) -> Claim:
        """Reserve concurrency for a call. With `is_again`, ignore the limit, because a lost engine process
        has already admitted the call. Raises OverloadedError."""
        limit = self._concurrency[work]
        with ExitStack() as resources:
            resources.enter_context(limit.acquire(count, is_again))
            return Claim(resources.pop_all())

    async def lease(
        self, claim: Claim, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        """Load the adapters with these ids. Raises RouterError."""
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
        live = LiveRequest(self._sequence(spec, claim), sink, events)
        if progress is not None:
            live.resume(progress)
        claim.live[sequence_id] = live
        if claim.adapters.digests == spec.adapters.digests:
            self._engine.open(live)
        else:  # An id refers to a different adapter now, or the adapter could not be loaded again.
            events.deliver(lost_adapter(spec.request_id))
        return live

    def cancel(self, live: LiveRequest) -> None:
        """End a generation without a final event. Do nothing if it has ended."""
        assert self._engine is not None
        self._engine.cancel(live)

    def release(self, claim: Claim) -> None:
        for live in claim.live.values():
            self.cancel(live)
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
        )
