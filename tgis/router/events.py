"""Events of a generation. They are plain values, so that APIs may run in other processes than the engine.
The last event of every accepted sequence is final, and no other event is."""

from dataclasses import dataclass
from typing import NamedTuple

from tgis.router.errors import Code
from tgis.router.sequence import StopReason, TokenDetail


@dataclass(frozen=True)
class Timings:
    """Durations of one generation, in seconds since it was accepted."""

    queue_s: float
    """Time until its first step, or the whole time if there was none."""
    first_token_s: float | None
    total_s: float

    @property
    def inference_s(self) -> float:
        return self.total_s - self.queue_s


@dataclass(frozen=True)
class InputTokens:
    """Details of all input tokens. It comes once, before the first token, if the client asked for it."""

    tokens: tuple[TokenDetail, ...]


class Ended(NamedTuple):
    """Final event of a generation that has a stop reason."""

    token: TokenDetail | None
    """Last token, unless it came before."""
    num_generated: int
    reason: StopReason
    timings: Timings
    num_cached: int = 0
    """Input tokens that needed no computation when it began."""


@dataclass(frozen=True)
class Failed:
    """Final event of a generation that could not be completed."""

    code: Code
    message: str


@dataclass(frozen=True)
class TimedOut:
    """Final event of a generation whose token did not come in time."""

    limit_s: float
    is_first: bool
    """True if the limit is that of the first token."""


Failure = Failed | TimedOut
Event = InputTokens | TokenDetail | Ended | Failure
"""Event of the engine, with token ids and no text. A token that is not the last is an event by itself."""


class Output(NamedTuple):
    """Tokens that an API has at once, with the text that may be shown now, which it makes of events and of
    their texts. It is final if it has a reason; then it has timings, and may have no token."""

    texts: tuple[str, ...]
    """Text that may be shown with each token, and what is left at an end between tokens."""
    tokens: tuple[TokenDetail, ...]
    num_generated: int
    """Number of tokens up to the last of these."""
    reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    timings: Timings | None = None
    num_cached: int = 0
    """Of a final one: input tokens that needed no computation when the generation began."""

    @property
    def text(self) -> str:
        return "".join(self.texts)
