"""Defines a request as it is sent, and the record of its answer."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tgis.load.errors import CancellationError
from tgis.load.workload.constraints import TextRule

MESSAGE_LENGTH = 300


class ChatTurn(NamedTuple):
    role: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Prompting:
    """One request, in no API's words."""

    turns: tuple[ChatTurn, ...]
    new_tokens: int
    is_exact: bool
    """True to generate exactly this number of tokens, whatever the model predicts."""
    seed: int
    more_texts: tuple[str, ...] = ()
    """Further prompts of the same call, each with its own answer."""
    is_stream: bool = True
    """False to ask for the whole answer in one message."""
    max_input_tokens: int | None = None
    """Number of tokens to which the service cuts the prompt; None: it does not."""
    counts_input: bool = False
    """True to send the prompt so that the service counts its tokens, if its usual answers have no count."""
    has_token_details: bool = False
    """True to ask for details of every token, so that also a token without text has a message."""
    temperature: float | None = None
    """None: greedy."""
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    rule: TextRule | None = None
    adapter_id: str | None = None
    soft_prompt_id: str | None = None

    @property
    def text(self) -> str:
        """Return the turns as one text, for APIs without chats."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the prompts of the call."""
        return (self.text, *self.more_texts)

    @property
    def wanted_tokens(self) -> int:
        """Return the maximum number of tokens of all answers together."""
        return self.new_tokens * (1 + len(self.more_texts))


@dataclass
class AnswerRecord:
    """Times of one request, in seconds from the start of the run, and what was received."""

    index: int
    turn: int
    intended: float
    """Time at which the request should have been sent, from which latencies are counted."""
    sent: float
    wanted_tokens: int
    arrivals: list[float] = field(default_factory=list)
    """Times of the messages with new tokens."""
    counts: list[int] = field(default_factory=list)
    """Number of generated tokens up to each of these messages."""
    ended: float = 0.0
    input_tokens: int = 0
    cached_tokens: int | None = None
    """None: the service does not report them."""
    accepted: float | None = None
    """Time of the first message, which may have no token."""
    error: str | None = None
    """Kind of the failure."""
    message: str = ""
    """What the service said about the failure."""
    is_cancelled: bool = False
    """True if the client cancelled the request in the middle."""
    faults: list[str] = field(default_factory=list)
    """Kinds of checks that the answer has failed."""
    digest: str | None = None
    """Digest of the answer, if another request must have the same one."""
    repeats: int | None = None
    """Number of the conversation whose content this one has, if it is another one's."""

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.is_cancelled

    @property
    def content(self) -> tuple[int, int]:
        """Return what is the same for requests that must have the same answer."""
        return (self.index if self.repeats is None else self.repeats, self.turn)

    @property
    def output_tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    @property
    def first_token_s(self) -> float | None:
        return self.arrivals[0] - self.intended if self.arrivals else None

    @property
    def total_s(self) -> float:
        return self.ended - self.intended

    @property
    def token_s(self) -> float | None:
        """Return the mean time of the tokens after those of the first message."""
        if not self.counts or self.counts[-1] == self.counts[0]:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.counts[-1] - self.counts[0])


class RunClock:
    """Seconds from the start of a run. Processes of a machine share the monotonic clock."""

    def __init__(self, start: float) -> None:
        self._start = start

    def __call__(self) -> float:
        return time.monotonic() - self._start


class AnswerReceiver:
    """Takes what an API's client receives for one request.

    Raises CancellationError in its methods when `cancel_after` tokens have arrived."""

    def __init__(
        self, record: AnswerRecord, clock: Callable[[], float], cancel_after: int | None = None
    ) -> None:
        self.record = record
        self.ends: dict[int, str] = {}
        """Reasons why the texts ended, in the API's words, by the number of the prompt."""
        self._clock = clock
        self._cancel_after = cancel_after
        self._texts: dict[int, list[str]] = {}

    @property
    def text(self) -> str:
        """Return the text for the first prompt."""
        return self.text_of(0)

    def text_of(self, number: int) -> str:
        return "".join(self._texts.get(number, ()))

    def digest(self) -> str:
        """Return the digest of texts, lengths and stop reasons."""
        texts = [self.text_of(number) for number in sorted(self._texts)]
        answer = json.dumps([texts, self.record.output_tokens, sorted(self.ends.items())])
        return hashlib.sha256(answer.encode()).hexdigest()[:16]

    def accept(self) -> None:
        """Take a message that has no token."""
        if self.record.accepted is None:
            self.record.accepted = self._clock()
        self._check_cancellation()

    def add_text(self, text: str, number: int = 0) -> None:
        """Take a part of the text for a prompt of the call."""
        self._texts.setdefault(number, []).append(text)

    def end(self, reason: str | None, number: int = 0) -> None:
        """Take the reason why a text ended, in the API's words; None: it has not ended."""
        if reason is not None:
            self.ends[number] = reason

    def count_tokens(self, num_generated: int) -> None:
        """Take the number of tokens generated so far."""
        record = self.record
        if num_generated > record.output_tokens:
            now = self._clock()
            record.accepted = record.accepted or now
            record.arrivals.append(now)
            record.counts.append(num_generated)
            self._check_cancellation()

    def _check_cancellation(self) -> None:
        if self._cancel_after is not None and self.record.output_tokens >= self._cancel_after:
            raise CancellationError

    def add_tokens(self, num_tokens: int) -> None:
        """Take the number of tokens of one message."""
        self.count_tokens(self.record.output_tokens + num_tokens)

    def correct_tokens(self, num_generated: int) -> None:
        """Take the final number of tokens from a service whose messages do not count them."""
        record = self.record
        if not record.counts:
            self.count_tokens(num_generated)
        elif num_generated != record.counts[-1]:
            factor = num_generated / record.counts[-1]
            record.counts = [max(1, round(count * factor)) for count in record.counts]
            record.counts[-1] = num_generated

    def report(self, input_tokens: int | None, cached_tokens: int | None) -> None:
        self.record.input_tokens = input_tokens or self.record.input_tokens
        if cached_tokens is not None:
            self.record.cached_tokens = cached_tokens
