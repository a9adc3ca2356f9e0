"""Events of a generation. They are plain values, so that API servers may one day run in other processes. The
last event of every accepted sequence is final, and no other event is."""

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
    """Details of all input tokens. It comes once, before the first Output, if the client asked for it."""

    tokens: tuple[TokenDetail, ...]


class Output(NamedTuple):
    """A token and the text that may be shown now. It is final if it has a reason; then it has timings, and
    the token may be missing."""

    text: str
    token: TokenDetail | None
    num_generated: int
    reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    timings: Timings | None = None


@dataclass(frozen=True)
class Failed:
    """Final event of a generation that could not be completed."""

    code: Code
    message: str


Event = InputTokens | Output | Failed


def is_final(event: Event) -> bool:
    return isinstance(event, Failed) or (
        isinstance(event, Output) and event.reason is not StopReason.NOT_FINISHED
    )
