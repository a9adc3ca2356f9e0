"""Handle of an engine in the same process, over the engine, the concurrency limit and the adapters."""

from collections import defaultdict
from collections.abc import AsyncIterator, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

from tgis.pb import shard_pb2
from tgis.router.adapters.registry import AdapterRegistry
from tgis.router.engine.concurrency import ConcurrencyLimit
from tgis.router.engine.engine import Engine, lost_adapter
from tgis.router.engine.handle import EngineInfo, Lease, Resume, SequenceId, SequenceSpec, TextSink, Ticket
from tgis.router.engine.live_request import LiveRequest
from tgis.router.events import Event
from tgis.router.sequence import AdapterInfo, CallAdapters, Sequence, Siblings


def is_encoder_decoder(info: shard_pb2.InfoResponse) -> bool:
    return info.model_kind == shard_pb2.InfoResponse.MODEL_KIND_ENCODER_DECODER


@dataclass(eq=False)
class _Held:
    """Resources of a ticket."""

    resources: ExitStack
    adapters: CallAdapters = field(default_factory=CallAdapters)
    sequences: list[SequenceId] = field(default_factory=list)
    siblings: defaultdict[Hashable, Siblings] = field(default_factory=lambda: defaultdict(Siblings))
    """By input and salt."""


class LocalHandle:
    """Implements EngineHandle. It may be used once `attach` has been called."""

    def __init__(self, concurrency: ConcurrencyLimit, adapters: AdapterRegistry) -> None:
        self._concurrency, self._adapters = concurrency, adapters
        self._held: dict[Ticket, _Held] = {}
        self._live: dict[SequenceId, LiveRequest] = {}
        self._numbers = count()
        self._engine: Engine | None = None

    def attach(self, engine: Engine, info: shard_pb2.InfoResponse) -> None:
        self._engine = engine
        self._pad_token_id, self._start_token_id = info.pad_token_id, info.decoder_start_token_id
        self._info = EngineInfo(
            is_encoder_decoder(info),
            info.vocab_size,
            frozenset(info.eos_token_ids),
            tuple(info.preloaded_adapter_ids),
        )

    def info(self) -> EngineInfo:
        return self._info

    async def acquire(self, count: int) -> Ticket:
        with ExitStack() as resources:
            resources.enter_context(self._concurrency.acquire(count))
            ticket = Ticket(next(self._numbers))
            self._held[ticket] = _Held(resources.pop_all())
        return ticket

    async def lease(
        self, ticket: Ticket, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> Lease:
        held = self._held[ticket]
        lease = held.resources.enter_context(self._adapters.lease(prefix_id, adapter_id, request_id))
        adapters = held.adapters = await lease.take()
        return Lease(
            _digest(adapters.soft_prompt),
            _digest(adapters.lora),
            adapters.num_decoder_tokens,
            adapters.num_encoder_tokens,
        )

    def open(
        self, ticket: Ticket, spec: SequenceSpec, sink: TextSink | None, resume: Resume | None = None
    ) -> SequenceId:
        assert self._engine is not None, "nothing is opened before the engine has started"
        held, sequence_id = self._held[ticket], SequenceId(next(self._numbers))
        sequence = self._sequence(spec, held)
        if resume is not None:
            sequence.resume(resume.generated, resume.has_inputs)
        if (_digest(held.adapters.soft_prompt), _digest(held.adapters.lora)) == spec.lease[:2]:
            live = self._engine.open(sequence, sink)
        else:  # an id names another adapter since the generation began
            live = LiveRequest(sequence, sink)
            live.events.deliver(lost_adapter(spec.request_id))
        self._live[sequence_id] = live
        held.sequences.append(sequence_id)
        return sequence_id

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        return self._live[sequence_id].events

    def cancel(self, sequence_id: SequenceId, keep: int | None = None) -> None:
        assert self._engine is not None
        live = self._live.get(sequence_id)
        if live is None:
            return
        if keep is None:
            del self._live[sequence_id]
            self._engine.cancel(live)
        else:
            self._engine.cut(live, keep)

    def release(self, ticket: Ticket) -> None:
        held = self._held.pop(ticket, None)
        if held is not None:
            for sequence_id in held.sequences:
                self.cancel(sequence_id)
            held.resources.close()

    def _sequence(self, spec: SequenceSpec, held: _Held) -> Sequence:
        """Return a new sequence, with padding in the places of virtual tokens."""
        adapters = held.adapters
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
            held.siblings[spec.input_ids, spec.cache_salt],
        )


def _digest(info: AdapterInfo | None) -> str:
    return "" if info is None else info.digest
