"""Defines the interface between the APIs and the engine. All arguments and results are plain values without
identity, so that the APIs and the engine can run in different processes on one machine."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType, Protocol

from tgis.router.events import Event, RequestTimes
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.scheduling.cache_events import CacheListener
from tgis.router.sequence import CacheSalt, CallAdapters, Details, Grammar, Stopping, StopReason
from tgis.sampling_parameters import Sampling

ClaimId = NewType("ClaimId", int)
"""Id of a call's claim to concurrency, adapters and sequences, from `acquire` to `release`."""
SequenceId = NewType("SequenceId", int)


class LimitedWork(Enum):
    """Kind of work with its own concurrency limit."""

    GENERATION = "generation"
    TOKENIZATION = "tokenization"


class EngineInfo(NamedTuple):
    """Facts about the model that the engine serves."""

    is_encoder_decoder: bool
    vocab_size: int
    eos_token_ids: frozenset[int]
    """Empty if the model's configuration has none."""
    preloaded_adapter_ids: tuple[str, ...] = ()
    num_cache_tokens: int = 0
    """Number of tokens for which the cache has room."""


class TenantLimits(NamedTuple):
    """Limits of the tenant that makes a call; None is no limit."""

    tenant: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


NO_LIMITS = TenantLimits()


class SequenceSpec(NamedTuple):
    """Complete specification of one generation, without the model."""

    input_ids: tuple[int, ...]
    """Input tokens, without virtual tokens and without a decoder's start token."""
    stopping: Stopping
    """Its deadline is a time on the machine's monotonic clock, which all processes share."""
    sampling: Sampling = Sampling()
    details: Details = Details()
    grammar: Grammar | None = None
    adapters: CallAdapters = CallAdapters()
    request_id: str = ""
    """Id of the call in the log and in the internal errors that clients see."""
    cache_salt: CacheSalt = CacheSalt()
    priority: int = 0
    """Sequences with lower values are admitted first."""


@dataclass
class Progress:
    """Delivered part of a generation. A new engine process can continue from it."""

    generated: list[int] = field(default_factory=list)
    has_inputs: bool = False
    """True if the details of the input tokens have been delivered or were not requested."""
    times: RequestTimes = field(default_factory=RequestTimes)


class CallName(NamedTuple):
    """Name by which clients of a tenant abort calls. Several calls may have the same name."""

    tenant: str
    client_id: str


class TextSink(Protocol):
    """Text of one generation on the API's side. It receives each token once, in order."""

    def push(self, token_id: int, reason: StopReason) -> bool:
        """Add the next token, with the engine's `reason` if the token is the last. Return True if a stop
        sequence ends the generation with this token, and False if there is a reason already."""


class GivenNames(Protocol):
    """Names that clients assign to LoRA adapters at run time."""

    async def adapter_names(self) -> Mapping[str, str]:
        """Return the adapters' ids by name. Without an engine, wait until it returns or is given up."""

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        """Assign a name to an adapter. All APIs know the name when this returns. Raises RequestError, and
        UnavailableError if the engine is unavailable for too long."""

    async def take_name(self, name: str) -> None:
        """Remove a name. No API knows the name when this returns. Raises NotFoundError, and UnavailableError
        if the engine is unavailable for too long."""


class EngineHandle(GivenNames, Protocol):
    """Interface of the engine for the APIs."""

    def info(self) -> EngineInfo:
        """Return the facts about the model, once the engine has started. They may differ after a restart."""

    async def acquire(
        self,
        count: int,
        work: LimitedWork = LimitedWork.GENERATION,
        name: CallName | None = None,
        limits: TenantLimits = NO_LIMITS,
    ) -> ClaimId:
        """Reserve concurrency for a call's inputs, within the limits of its tenant. With a name, other router
        workers can abort the call until its claim is released. Raises OverloadedError, and UnavailableError
        if the engine is unavailable for too long."""

    async def lease(
        self, claim_id: ClaimId, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        """Load the adapters with these ids, and keep them until the claim is released. A claim has at most
        one lease. `release` must not be called until this has returned or been cancelled. Raises
        RouterError."""

    def open(
        self, claim_id: ClaimId, spec: SequenceSpec, sink: TextSink | None, progress: Progress | None = None
    ) -> SequenceId:
        """Start a generation. The engine pushes each token to `sink` before it schedules the next step, and
        ends the sequence at a stop sequence. If the engine runs in another process, the worker's side of the
        handle pushes each token when it arrives. With `progress`, the generation continues from there, and
        the tokens of `progress` are neither reported nor pushed again.

        Sequences of one claim with equal input tokens and salts are siblings: one of them computes the
        input, and the others wait until they can share its cached blocks. A sequence that has a deadline or
        reports its input details does not wait."""

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        """Return the iterator over a sequence's events, for one reader. Each list has all events since the
        previous list, in order, and is never empty. The last event of the last list is final, unless
        `cancel` ends the sequence. Tokens are pushed to the sink before their events are returned."""

    def cancel(self, sequence_id: SequenceId) -> None:
        """Stop computing a sequence and delivering its events. Do nothing if the sequence has ended or is
        unknown."""

    def watch_cache(self, listener: CacheListener | None) -> None:
        """Report changes of the prefix cache to a listener, or to none. The first report, and the first one
        of a later engine, begins with the removal of all earlier blocks."""

    def watch_aborts(self, listener: Callable[[CallName], object]) -> None:
        """Call `listener` for each call of this worker that another router worker aborts."""

    async def abort_elsewhere(self, name: CallName) -> bool:
        """Ask the other router workers to abort the calls with a name. Return False if they have none. Raises
        UnavailableError if the engine is unavailable for too long."""

    def flush_cache(self) -> None:
        """Forget all cached prefixes. Running sequences are not affected."""

    def release(self, claim_id: ClaimId) -> None:
        """Cancel the claim's sequences and release its resources. Do nothing if that has been done."""


class EngineHost(Protocol):
    """Lifecycle of the engine behind a handle. Only the router's main program controls it."""

    handle: EngineHandle

    @property
    def num_live(self) -> int:
        """Number of accepted sequences that have no final event yet."""

    async def start(self) -> None:
        """Wait for the shards, and load the preloaded adapters. Raises StartupError."""

    async def run(self) -> None:
        """Run the started engine until cancelled. The engine survives the loss of the shards."""

    async def gauges(self) -> list[GaugeValues]:
        """Return the gauges of all other processes of this router. The caller must limit the time, because
        this may wait for a lost process."""

    def give_up(self) -> None:
        """Fail all requests and refuse new ones, because the shards are lost."""

    async def close(self) -> None:
        """Close the connections to the shards, even if `start` has not returned."""
