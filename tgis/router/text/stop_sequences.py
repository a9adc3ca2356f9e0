"""Text of a generation: whether a stop sequence ends it, and which part of it may be shown meanwhile."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import regex

from tgis.router.sequence import StopReason
from tgis.router.text.detokenizer import Vocabulary

MAX_CLUSTER = 512
"""Number of characters after which a grapheme cluster is taken to end, which bounds the cost of a token."""

_CLUSTER = regex.compile(r"\X")
_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it


@dataclass(frozen=True)
class StopSequences:
    """Texts that end a generation."""

    texts: tuple[str, ...] = ()
    are_included: bool = True
    """True if the text includes the stop sequence that ends it."""
    min_new_tokens: int = 0
    """Number of the first token that may end with a stop sequence."""


class StopMatcher:
    """Matcher that finds stop sequences in a text that arrives in pieces.

    A match must use some of the newest piece. The first sequence of the list that matches wins, at its
    right-most place. Strings stand for their UTF-8 bytes here: no character's bytes occur within those of
    another, so valid strings match the same either way."""

    def __init__(self, stop_sequences: tuple[str, ...]) -> None:
        self._stop_sequences = stop_sequences
        reach = max((len(stop) for stop in stop_sequences), default=1) - 1
        self._end = slice(-reach, None) if reach else slice(0)
        self._tail = ""  # end of the text so far, as long as a match could reach back

    def find(self, text: str) -> tuple[str, int]:
        """Return the stop sequence that `text` completes, or an empty string, and the number of characters
        after it. `text` counts as seen only after `add`."""
        window = self._tail + text
        for stop in self._stop_sequences:
            if stop in window:  # this is rare, so the code below need not be fast
                start = window.rfind(stop, max(len(self._tail) - len(stop) + 1, 0))
                if start >= 0:
                    return stop, len(window) - start - len(stop)
        return "", 0

    def add(self, text: str) -> None:
        self._tail = (self._tail + text)[self._end]


class TextBuffer(Protocol):
    """Buffer of the end of a text, which may not be shown yet."""

    def push(self, text: str) -> str:
        """Add `text`, and return the text that may be shown now."""

    def flush(self) -> str:
        """Return all the text that is held."""


class ClusterBuffer:
    """Buffer that shows whole grapheme clusters. It shows the text up to the last beginning of a cluster that
    leaves `hold_back` bytes and those of the newest piece behind it; with `hold_back` 0, all but the last
    cluster."""

    def __init__(self, hold_back: int) -> None:
        self._hold_back, self._held = hold_back, ""

    def push(self, text: str) -> str:
        held = self._held + text
        if held.isascii():
            end = _ascii_start(held, len(self._held) - self._hold_back if self._hold_back else len(held))
        elif not self._hold_back and len(held) <= MAX_CLUSTER:
            end = len(held) - len(_CLUSTER.findall(held)[-1])
        else:
            behind = self._hold_back + len(text.encode()) if self._hold_back else 0
            end = _cluster_start(held, len(held.encode()) - behind)
        self._held = held[end:]
        return held[:end]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class PieceBuffer:
    """Buffer that shows whole pieces, up to the last end of one that leaves `hold_back` bytes behind it."""

    def __init__(self, hold_back: int) -> None:
        self._hold_back = hold_back
        self._held: deque[tuple[str, int]] = deque()  # pieces and their numbers of bytes
        self._num_bytes = 0

    def push(self, text: str) -> str:
        if not self._hold_back:
            return text
        size = len(text.encode())
        self._held.append((text, size))
        self._num_bytes += size
        shown = []
        while self._held and self._num_bytes - self._held[0][1] >= self._hold_back:
            piece, size = self._held.popleft()
            self._num_bytes -= size
            shown.append(piece)
        return "".join(shown)

    def flush(self) -> str:
        text = "".join(piece for piece, _ in self._held)
        self._held.clear()
        self._num_bytes = 0
        return text


class StopScope(Protocol):
    """Divides a text into spans, with True for those in which stop sequences are looked for. Text that is in
    no span yet is not shown."""

    def push(self, text: str) -> list[tuple[str, bool]]: ...

    def flush(self) -> list[tuple[str, bool]]: ...


class TextStream:
    """Text of one generation from its tokens: the sink of an API, which takes the text that each token shows.
    What the engine pushes ahead of the API is kept until then."""

    def __init__(
        self, vocabulary: Vocabulary, stops: StopSequences, make_scope: Callable[[], StopScope] | None = None
    ) -> None:
        """Create the text. Without a scope, stop sequences are looked for in all of it."""
        self._stops = stops
        self._scope = make_scope() if make_scope is not None and stops.texts else None
        self._detokenizer = vocabulary.detokenizer()
        self._matcher = StopMatcher(stops.texts) if stops.texts else None
        buffer = ClusterBuffer if vocabulary.streams_clusters else PieceBuffer
        self._buffer: TextBuffer = buffer(_hold_back(stops))
        self._num_tokens = 0
        self._texts: list[str] = []
        self.stop_sequence = ""
        """Stop sequence that ends the generation with the last token; empty if none does."""

    def push(self, token_id: int, reason: StopReason) -> bool:
        """Add the next token, with the engine's reason if it is the last. Return True if a stop
        sequence makes it the last. No further token may follow the last one."""
        self._num_tokens += 1
        # The token that ends a sequence is not part of the text, even if special tokens are.
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
        """Return the text that may be shown once these spans have come, up to a stop sequence in them."""
        shown = ""
        for text, is_searched in spans:
            shown += self._show(text, is_searched)
            if self.stop_sequence:
                break
        return shown

    def _show(self, text: str, is_searched: bool) -> str:
        """Return the text that may be shown once `text` has come, up to a stop sequence in it."""
        if is_searched and self._matcher is not None:
            if self._num_tokens >= self._stops.min_new_tokens:
                stop, num_after = self._matcher.find(text)
                if stop:
                    self.stop_sequence = stop
                    return self._cut(text, stop, num_after)
            self._matcher.add(text)
        return self._buffer.push(text)

    def take(self, count: int) -> tuple[str, ...]:
        """Return the texts that may be shown with each of the next tokens, which have been pushed."""
        texts = self._texts
        if count == len(texts):  # mostly the API has caught up
            self._texts = []
            return tuple(texts)
        taken, self._texts = texts[:count], texts[count:]
        return tuple(taken)

    def flush(self) -> str:
        """Return the text that is held back, for a generation that ends between tokens."""
        return self._buffer.flush() + self._flush_scope() + self._detokenizer.flush()

    def _flush_scope(self) -> str:
        return "" if self._scope is None else "".join(text for text, _ in self._scope.flush())

    def _cut(self, text: str, stop: str, num_after: int) -> str:
        unshown = self._buffer.flush() + text
        num_cut = num_after if self._stops.are_included else num_after + len(stop)
        assert num_cut <= len(unshown), "of a stop sequence nothing has been shown"
        return unshown[: len(unshown) - num_cut]


def _hold_back(stops: StopSequences) -> int:
    """Return the number of bytes that a stop sequence may still take away."""
    if not stops.texts:
        return 0
    if stops.are_included:
        return 1
    return max(len(stop.encode()) for stop in stops.texts)


def _ascii_start(text: str, cutoff: int) -> int:
    """Return what `_cluster_start` returns for ASCII, where only CR LF is a longer cluster."""
    if cutoff <= 0:
        return 0
    start = cutoff if cutoff < len(text) else len(text) - 1
    return start - 1 if start and text[start] == "\n" and text[start - 1] == "\r" else start


def _cluster_start(text: str, cutoff: int) -> int:
    """Return the index of the last grapheme cluster that begins within the first `cutoff` bytes, or 0 if only
    the first does. The search looks no further."""
    start = num_bytes = 0
    while True:
        cluster = _CLUSTER.match(text, start, start + MAX_CLUSTER)
        num_bytes += len(cluster[0].encode()) if cluster else 0
        if cluster is None or cluster.end() == len(text) or num_bytes > cutoff:
            return start
        start = cluster.end()
