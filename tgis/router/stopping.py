"""Decides after every token whether a generation ends, and what of its text may be shown meanwhile."""

import time
from dataclasses import dataclass

from tgis.router.detokenizer import Detokenizer, Vocabulary
from tgis.router.sequence import Stopping, StopReason


@dataclass(frozen=True)
class Piece:
    """What one token adds: text that is certain, and whether it was the last."""

    text: str
    reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""


class StopMatcher:
    """Finds stop sequences in a text that arrives in pieces.

    A match must use some of the newest piece. The first sequence of the list that matches wins, at its
    right-most place. `push` holds back the longest end of the text that could still become a stop sequence,
    unless those stay in the text anyway."""

    def __init__(self, stop_sequences: tuple[str, ...], include: bool) -> None:
        self._stop_sequences, self._include = stop_sequences, include
        self._reach = max((len(stop) for stop in stop_sequences), default=1) - 1
        self._tail = ""  # the end of the text so far, as far as a match could reach back
        self._held = ""  # the end of the text that is not released yet

    def push(self, text: str, active: bool = True) -> tuple[str, str]:
        """Returns (text to release, stop sequence that matched or empty); no match is looked for unless
        `active`."""
        stop, end = self._find(text) if active and text else ("", 0)
        window, unreleased = self._tail + text, self._held + text
        if stop:
            cut = end if self._include else end - len(stop)
            self._held = ""
            return unreleased[: max(len(unreleased) - (len(window) - cut), 0)], stop
        self._tail = window[max(len(window) - self._reach, 0) :]
        num_held = 0 if self._include else self._possible_beginning(unreleased)
        self._held = unreleased[len(unreleased) - num_held :]
        return unreleased[: len(unreleased) - num_held], ""

    def flush(self) -> str:
        """The text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[str, int]:
        """The stop sequence and where in the window it ends."""
        window = self._tail + text
        for stop in self._stop_sequences:
            first = max(len(self._tail) - len(stop) + 1, 0)
            start = window.rfind(stop, first)
            if start >= 0:
                return stop, start + len(stop)
        return "", 0

    def _possible_beginning(self, text: str) -> int:
        longest = 0
        for stop in self._stop_sequences:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TextStream:
    """From the sampled tokens of one generation to its text and its end, in TGIS's order of reasons."""

    def __init__(self, vocabulary: Vocabulary, stopping: Stopping) -> None:
        self._stopping = stopping
        self._detokenizer = Detokenizer(vocabulary)
        self._matcher = StopMatcher(stopping.stop_sequences, stopping.include_stop_sequence)
        self._num_tokens = 0

    def push(self, token_id: int) -> Piece:
        """The next token. After a piece with a reason there is no further push."""
        self._num_tokens += 1
        active = self._num_tokens >= self._stopping.min_new_tokens
        reason = self._reason(token_id)
        # A reason that comes before stop sequences leaves the text uncut, so none is looked for.
        look = active and reason is StopReason.NOT_FINISHED
        text, stop = self._matcher.push(self._detokenizer.push(token_id), look)
        if stop:
            return Piece(text, StopReason.STOP_SEQUENCE, stop)
        if reason is not StopReason.NOT_FINISHED:
            return Piece(text + self.flush(), reason)
        return Piece(text)

    def flush(self) -> str:
        """What is held back; for a generation that ends between tokens."""
        last, _ = self._matcher.push(self._detokenizer.flush(), active=False)
        return last + self._matcher.flush()

    def _reason(self, token_id: int) -> StopReason:
        stopping = self._stopping
        if stopping.deadline is not None and time.monotonic() > stopping.deadline:
            return StopReason.TIME_LIMIT
        if self._num_tokens < stopping.min_new_tokens:
            return StopReason.NOT_FINISHED
        if token_id in stopping.eos_token_ids:
            return StopReason.EOS_TOKEN
        if self._num_tokens >= stopping.max_new_tokens:
            return StopReason.TOKEN_LIMIT if stopping.reduced else StopReason.MAX_TOKENS
        return StopReason.NOT_FINISHED
