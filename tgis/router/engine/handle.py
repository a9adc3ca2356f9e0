"""Seam between the APIs and the engine. Everything that crosses it is a plain value whose identity never
matters, so that an API and the engine may be in different processes of one machine."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType, Protocol

from tgis.router.events import Event, Timings
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.sequence import CacheSalt, CallAdapters, Details, Grammar, Stopping, StopReason
from tgis.sampling_parameters import Sampling

ClaimId = NewType("ClaimId", int)
"""Number of a call's claim to concurrency, adapters and sequences, from `acquire` to `release`."""
SequenceId = NewType("SequenceId", int)


class LimitedWork(Enum):
    """Kind of work that has a concurrency limit of its own."""

    GENERATION = "generation"
    TOKENIZATION = "tokenization"


class EngineInfo(NamedTuple):
    """Facts about the model that the engine serves."""

    is_encoder_decoder: bool
    vocab_size: int
    eos_token_ids: frozenset[int]
    """Empty if the model's configuration names none."""
    preloaded_adapter_ids: tuple[str, ...] = ()


class SequenceSpec(NamedTuple):
    """Everything that determines one generation, except for the model."""

    input_ids: tuple[int, ...]
    """Input tokens without virtual tokens and without the token that an encoder-decoder model starts from."""
    stopping: Stopping
    """The deadline is a time on the machine's monotonic clock, which all its processes share."""
    sampling: Sampling = Sampling()
    details: Details = Details()
    grammar: Grammar | None = None
    adapters: CallAdapters = CallAdapters()
    request_id: str = ""
    """Id of its call in the log and in internal errors that a client sees."""
    cache_salt: CacheSalt = CacheSalt()


@dataclass
class RequestTimes:
    """Times of a generation on the machine's monotonic clock, in seconds. None: not reached yet."""

    accepted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """Time of its first step."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_cached: int = 0
    """Input tokens that needed no computation when it began."""

    def timings(self, now: float) -> Timings:
        """Return the durations of a generation that ends now."""
        started_at = now if self.started_at is None else self.started_at
        first = None if self.first_token_at is None else self.first_token_at - self.accepted_at
        return Timings(started_at - self.accepted_at, first, now - self.accepted_at)


@dataclass
class Progress:
    """Delivered part of a generation, which outlives the loss of the engine process."""

    generated: list[int] = field(default_factory=list)
    has_inputs: bool = False
    """True if the details of the input tokens have been delivered, or were not asked for."""
    times: RequestTimes = field(default_factory=RequestTimes)


class TextSink(Protocol):
    """Text of one generation, on the API's side. It gets every token in order, once."""

    def push(self, token_id: int, reason: StopReason) -> bool:
        """Add the next token. `reason` is the engine's, if the token is the last. Return True if a stop
        sequence ends the generation with this token, which is only asked of tokens without a reason."""


class GivenNames(Protocol):
    """Names that clients give LoRA adapters while the service runs."""

    async def adapter_names(self) -> Mapping[str, str]:
        """Return the adapters' ids by name. Without an engine, wait until it is back or given up."""

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        """Give an adapter a name, which all APIs know when this returns. Raises RequestError and, if the
        engine stays away too long, UnavailableError."""

    async def take_name(self, name: str) -> None:
        """Take a name away, which no API knows any more when this returns. Raises NotFoundError and
        UnavailableError."""


class EngineHandle(GivenNames, Protocol):
    """Engine as the APIs see it."""

    def info(self) -> EngineInfo:
        """Return what is known of the model since the engine has started. It may differ after a restart."""

    async def acquire(self, count: int, work: LimitedWork = LimitedWork.GENERATION) -> ClaimId:
        """Take concurrency for a call's inputs. Raises OverloadedError, and UnavailableError if the engine
        stays away too long."""

    async def lease(
        self, claim_id: ClaimId, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> CallAdapters:
        """Load the adapters that the ids name, until the claim is released. At most one lease per claim.
        `release` must not come before this has returned or been cancelled. Raises RouterError."""

    def open(
        self, claim_id: ClaimId, spec: SequenceSpec, sink: TextSink | None, progress: Progress | None = None
    ) -> SequenceId:
        """Begin to generate. The engine calls `sink` for each token before it plans the next step, and ends
        the sequence at a stop sequence. Where the engine is in another process, the worker's half of the
        handle calls it when the token arrives. With `progress`, the generation continues after it, and
        neither reports nor pushes its tokens again.

        Sequences of one claim with equal input tokens and salts are siblings: one of them computes the
        input, and the others wait until they can share its cached blocks. A sequence with a deadline, or
        that reports its input details, does not wait."""

    def events(self, sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        """Return the iterator of a sequence's events, for one reader. Each list is everything that has
        arrived since the one before, in order, and is never empty. The last event of the last list is final
        unless `cancel` ends it. The sink has been told of a token when its event is returned."""

    def cancel(self, sequence_id: SequenceId) -> None:
        """Compute nothing more for a sequence, and deliver nothing more. A sequence that has ended, or is not
        known, is left alone."""

    def release(self, claim_id: ClaimId) -> None:
        """Cancel the claim's sequences and give back its resources. Releasing it again does nothing."""


class EngineHost(Protocol):
    """Life of the engine behind a handle, which only the router's main program governs."""

    handle: EngineHandle

    @property
    def num_live(self) -> int:
        """Accepted sequences without a final event."""

    async def start(self) -> None:
        """Wait for the shards, and load the preloaded adapters. Raises StartupError."""

    async def run(self) -> None:
        """Serve until cancelled; after `start`. The engine survives the loss of the shards."""

    async def gauges(self) -> list[GaugeValues]:
        """Return the gauges of all other processes of this router. May wait for one that is lost; the caller
        limits the time."""

    def give_up(self) -> None:
        """End all requests and refuse new ones, because the shards are lost."""

    async def close(self) -> None:
        """Close the connections to the shards, also if `start` has not returned."""
