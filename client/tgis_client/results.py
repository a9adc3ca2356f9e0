"""Defines the results of calls."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple


class StopReason(IntEnum):
    """Reason why a text ended, with fmaas's names and numbers."""

    NOT_FINISHED = 0
    MAX_TOKENS = 1
    EOS_TOKEN = 2
    CANCELLED = 3
    TIME_LIMIT = 4
    STOP_SEQUENCE = 5
    TOKEN_LIMIT = 6
    ERROR = 7
    UNKNOWN = -1
    """A reason that this version of the client does not know."""

    @classmethod
    def _missing_(cls, value: object) -> "StopReason":
        return cls.UNKNOWN


class ModelKind(Enum):
    DECODER_ONLY = 0
    ENCODER_DECODER = 1
    UNKNOWN = -1

    @classmethod
    def _missing_(cls, value: object) -> "ModelKind":
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class TopToken:
    text: str
    logprob: float
    id: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    """The vocabulary's piece, not decoded text; with `token_ids=True`, the id in decimal."""
    logprob: float
    rank: int
    """Rank from 1; 0 if it was not requested."""
    top_tokens: tuple[TopToken, ...] = ()
    id: int | None = None
    """None unless the call had `token_ids=True`."""


@dataclass(frozen=True, slots=True)
class CallReport:
    """Times and counts of a whole call: sums, and the slowest input's times. None: the service sent none."""

    queue_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None


NO_REPORT = CallReport()


@dataclass(frozen=True, slots=True)
class Generation:
    """Text for a prompt; in a stream, what was added since the part before."""

    text: str = ""
    input_token_count: int = 0
    generated_token_count: int = 0
    stop_reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    """The sequence that ended the text, with StopReason.STOP_SEQUENCE."""
    seed: int = 0
    tokens: tuple[Token, ...] = ()
    input_tokens: tuple[Token, ...] = ()
    report: CallReport = NO_REPORT


def join(parts: Iterable[Generation]) -> Generation:
    """Return the whole text of a stream's parts. Counts, seed and reason are the last that were sent."""
    parts = list(parts)
    end = parts[-1] if parts else Generation()
    return replace(
        end,
        text="".join(part.text for part in parts),
        input_token_count=max((part.input_token_count for part in parts), default=0),
        generated_token_count=max((part.generated_token_count for part in parts), default=0),
        seed=next((part.seed for part in reversed(parts) if part.seed), 0),
        tokens=tuple(token for part in parts for token in part.tokens),
        input_tokens=tuple(token for part in parts for token in part.input_tokens),
    )


class Offset(NamedTuple):
    """Place of a token in the text's UTF-8 bytes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tokenization:
    token_count: int
    tokens: tuple[str, ...] = ()
    offsets: tuple[Offset, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Empty unless the call had `token_ids=True`."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model_kind: ModelKind
    max_sequence_length: int
    max_new_tokens: int
