"""Builds the text of a sequence: finds stop sequences, and withholds text that one may still remove."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import regex

from tgis.router.sequence import StopReason
from tgis.router.text.detokenizer import Vocabulary

MAX_CLUSTER = 512
"""Number of characters after which a grapheme cluster is cut, to limit the cost per token."""

_CLUSTER = regex.compile(r"\X")
_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it


@dataclass(frozen=True)
class StopSequences:
    """Texts that end a sequence."""

    texts: tuple[str, ...] = ()
    are_included: bool = True
    """True if the text includes the stop sequence at its end."""
    min_new_tokens: int = 0
    """Number of tokens before which stop sequences are ignored."""


class StopMatcher:
    """Matcher that finds stop sequences in a text that arrives in pieces.

    A match must include part of the newest piece. The first matching sequence of the list wins, at its last
    position. The contract defines matches on UTF-8 bytes; matches on strings are equivalent, because no
    character's bytes occur within another character's bytes."""

    def __init__(self, stop_sequences: tuple[str, ...]) -> None:
        self._stop_sequences = stop_sequences
        reach = max((len(stop) for stop in stop_sequences), default=1) - 1
        self._end = slice(-reach, None) if reach else slice(0)
        self._tail = ""  # end of the text so far that a match could include

    def find(self, text: str) -> tuple[str, int]:
        """Return the stop sequence that `text` completes, or an empty string, and the number of characters
        after it. This does not add `text`."""
        window = self._tail + text
        for stop in self._stop_sequences:
            if stop in window:  # rare, so the code below need not be fast
                start = window.rfind(stop, max(len(self._tail) - len(stop) + 1, 0))
                if start >= 0:
                    return stop, len(window) - start - len(stop)
        return "", 0

    def add(self, text: str) -> None:
        self._tail = (self._tail + text)[self._end]


class TextBuffer(Protocol):
    """Buffer for the end of a text that must not be sent yet."""

    def push(self, text: str) -> str:
        """Add `text`, and return the text that may be sent now."""

    def flush(self) -> str:
        """Return all buffered text."""


class ClusterBuffer:
    """Buffer that releases whole grapheme clusters. It releases the text up to the last start of a cluster
    that leaves at least `hold_back` bytes and the newest piece buffered; with `hold_back` 0, all but the last
    cluster."""

    def __init__(self, hold_back: int) -> None:
        self._hold_back = hold_back
        self._buffered = ""

    def push(self, text: str) -> str:
        buffered = self._buffered + text
        if buffered.isascii():
            end = _ascii_start(
                buffered, len(self._buffered) - self._hold_back if self._hold_back else len(buffered)
            )
        elif not self._hold_back and len(buffered) <= MAX_CLUSTER:
            end = len(buffered) - len(_CLUSTER.findall(buffered)[-1])
        else:
            behind = self._hold_back + len(text.encode()) if self._hold_back else 0
            end = _cluster_start(buffered, len(buffered.encode()) - behind)
        self._buffered = buffered[end:]
        return buffered[:end]

    def flush(self) -> str:
        buffered = self._buffered
        self._buffered = ""
        return buffered


class PieceBuffer:
    """Buffer that releases whole pieces and keeps at least `hold_back` bytes buffered."""

    def __init__(self, hold_back: int) -> None:
        self._hold_back = hold_back
        self._pieces: deque[tuple[str, int]] = deque()  # pieces and their sizes in bytes
        self._num_bytes = 0

    def push(self, text: str) -> str:
        if not self._hold_back:
            return text
        size = len(text.encode())
        self._pieces.append((text, size))
        self._num_bytes += size
        released = []
        while self._pieces and self._num_bytes - self._pieces[0][1] >= self._hold_back:
            piece, size = self._pieces.popleft()
            self._num_bytes -= size
            released.append(piece)
        return "".join(released)

    def flush(self) -> str:
        text = "".join(piece for piece, _ in self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        return text


class StopScope(Protocol):
    """Splits a text into spans, with True for spans that are searched for stop sequences. Text that is not
    yet in a span is not sent."""

    def push(self, text: str) -> list[tuple[str, bool]]: ...

    def flush(self) -> list[tuple[str, bool]]: ...


class TextStream:
    """Text of one sequence, built from its tokens. The engine pushes tokens; an API takes the text that each
    token adds. Texts are queued until the API takes them."""

    def __init__(
        self, vocabulary: Vocabulary, stops: StopSequences, make_scope: Callable[[], StopScope] | None = None
    ) -> None:
        """Create the text. Without a scope, all of it is searched for stop sequences."""
        self._stops = stops
        self._scope = make_scope() if make_scope is not None and stops.texts else None
        self._detokenizer = vocabulary.detokenizer()
        self._matcher = StopMatcher(stops.texts) if stops.texts else None
        buffer = ClusterBuffer if vocabulary.streams_clusters else PieceBuffer
        self._buffer: TextBuffer = buffer(_hold_back(stops))
        self._num_tokens = 0
        self._texts: list[str] = []
        self.stop_sequence = ""
        """Stop sequence that ends the sequence with its last token; empty if none does."""

    def push(self, token_id: int, reason: StopReason) -> bool:
        """Add the next token, with the engine's stop reason if it is the last. Return True if a stop sequence
        makes it the last. No token may follow the last one."""
        self._num_tokens += 1
        # The EOS token is not part of the text, even if special tokens are.
        text = "" if reason is StopReason.EOS_TOKEN else self._detokenizer.push(token_id)
        if reason is not _NOT_FINISHED:
            text = self._buffer.flush() + self._flush_scope() + text + self._detokenizer.flush()
            self._texts.append(text)
            return False
        if not text:
            self._texts.append("")
            return False
        if self._scope is None:
            self._texts.append(self._show(text, is_searched=True))
        else:
            self._texts.append(self._show_spans(self._scope.push(text)))
        return bool(self.stop_sequence)

    def _show_spans(self, spans: list[tuple[str, bool]]) -> str:
        """Return the text that may be sent after adding these spans, up to a stop sequence in them."""
        shown = ""
        for text, is_searched in spans:
            shown += self._show(text, is_searched)
            if self.stop_sequence:
                break
        return shown

    def _show(self, text: str, is_searched: bool) -> str:
        """Return the text that may be sent after adding `text`, up to a stop sequence in it."""
        if is_searched and self._matcher is not None:
            if self._num_tokens >= self._stops.min_new_tokens:
                stop, num_after = self._matcher.find(text)
                if stop:
                    self.stop_sequence = stop
                    return self._cut(text, stop, num_after)
            self._matcher.add(text)
        return self._buffer.push(text)

    def take(self, count: int) -> tuple[str, ...]:
        """Return the texts that each of the next `count` pushed tokens adds."""
        texts = self._texts
        if count == len(texts):  # the usual case
            self._texts = []
            return tuple(texts)
        self._texts = texts[count:]
        return tuple(texts[:count])

    def flush(self) -> str:
        """Return the withheld text, for a sequence that ends between tokens."""
        return self._buffer.flush() + self._flush_scope() + self._detokenizer.flush()

    def _flush_scope(self) -> str:
        return "" if self._scope is None else "".join(text for text, _ in self._scope.flush())

    def _cut(self, text: str, stop: str, num_after: int) -> str:
        unsent = self._buffer.flush() + text
        num_cut = num_after if self._stops.are_included else num_after + len(stop)
        assert num_cut <= len(unsent), "part of the stop sequence was sent"
        return unsent[: len(unsent) - num_cut]


class NoText:
    """Substitute for the text of a sequence of which only the token ids are returned."""

    stop_sequence = ""

    def push(self, token_id: int, reason: StopReason) -> bool:
        return False

    def take(self, count: int) -> tuple[str, ...]:
        return ()

    def flush(self) -> str:
        return ""


def _hold_back(stops: StopSequences) -> int:
    """Return the number of bytes that a stop sequence may still remove."""
    if not stops.texts:
        return 0
    if stops.are_included:
        return 1
    return max(len(stop.encode()) for stop in stops.texts)


def _ascii_start(text: str, cutoff: int) -> int:
    """Return the result of `_cluster_start` for ASCII text, where CR LF is the only longer cluster."""
    if cutoff <= 0:
        return 0
    start = cutoff if cutoff < len(text) else len(text) - 1
    return start - 1 if start and text[start] == "\n" and text[start - 1] == "\r" else start


def _cluster_start(text: str, cutoff: int) -> int:
    """Return the index of the last grapheme cluster that begins within the first `cutoff` bytes, or 0 if only
    the first does. Text after it is not searched."""
    start = num_bytes = 0
    while True:
        cluster = _CLUSTER.match(text, start, start + MAX_CLUSTER)
        num_bytes += len(cluster[0].encode()) if cluster else 0
        if cluster is None or cluster.end() == len(text) or num_bytes > cutoff:
            return start
        start = cluster.end()
