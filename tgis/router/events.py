"""Defines the events of a generation. They are plain values, so that the APIs and the engine can run in
different processes. Only the last event of an accepted sequence is final."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from tgis.router.errors import Code
from tgis.router.sequence import StopReason, TokenDetail


@dataclass(frozen=True)
class Timings:
    """Durations of one generation, in seconds since its acceptance."""

    queue_s: float
    """Time until the first step, or the total time if there was no step."""
    first_token_s: float | None
    total_s: float

    @property
    def inference_s(self) -> float:
        return self.total_s - self.queue_s


@dataclass
class RequestTimes:
    """Times of a generation on the machine's monotonic clock, in seconds. None means not reached yet."""

    accepted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """Time at which the first step was sent."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_cached: int = 0
    """Number of input tokens that were cached when the generation started."""

    def timings(self, now: float) -> Timings:
        """Return the durations of a generation that ends at `now`."""
        started_at = now if self.started_at is None else self.started_at
        first = None if self.first_token_at is None else self.first_token_at - self.accepted_at
        return Timings(started_at - self.accepted_at, first, now - self.accepted_at)


@dataclass(frozen=True)
class InputTokens:
    """Details of all input tokens. If the client requests them, they arrive once, before the first token."""

    tokens: tuple[TokenDetail, ...]


class Ended(NamedTuple):
    """Final event of a generation that has a stop reason."""

    token: TokenDetail | None
    """Last token, or None if it arrived in an earlier event."""
    num_generated: int
    reason: StopReason
    timings: Timings
    num_cached: int = 0
    """Number of input tokens that were cached when the generation started."""


@dataclass(frozen=True)
class Failed:
    """Final event of a generation that could not be completed."""

    code: Code
    message: str


@dataclass(frozen=True)
class TimedOut:
    """Final event of a generation whose next token did not arrive in time."""

    limit_s: float
    is_first: bool
    """True if the limit is the first token's."""
    is_queued: bool = False
    """True if the limit is that of the queue, before the first step."""


Failure = Failed | TimedOut
Event = InputTokens | TokenDetail | Ended | Failure
"""Event of the engine, with token ids but without text. Each token before the last is an event by itself."""


class Output(NamedTuple):
    """Tokens that an API gets together, with the text that may be shown now. It is final if it has a stop
    reason. A final output has timings, and may have no tokens."""

    texts: tuple[str, ...]
    """Text that may be shown with each token, and then any remaining text if an end has no token."""
    tokens: tuple[TokenDetail, ...]
    num_generated: int
    """Number of generated tokens, including these."""
    reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    timings: Timings | None = None
    num_cached: int = 0
    """Number of input tokens that were cached when the generation started. Only final outputs have it."""

    @property
    def text(self) -> str:
        return "".join(self.texts)
