"""Reads an answer that consists of messages in channels (`formats/harmony.py`). The result does not depend on
how the text is split."""

from collections.abc import Set
from enum import Enum
from typing import NamedTuple

from tgis.router.chat.answers.call_reader import NO_ARGUMENTS
from tgis.router.chat.answers.pieces import CallArguments, CallBegin, ContentText, Piece, ReasoningText
from tgis.router.chat.answers.text_source import TextSource, Wait
from tgis.router.chat.formats import harmony

_ENDS = (harmony.END, harmony.CALL, harmony.RETURN)
_MARK_BEGIN = "<|"  # of every mark


class MessagePart(Enum):
    """Part of an answer to which a text belongs."""

    HEADER = "header"  # also marks
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


class MessageText(NamedTuple):
    part: MessagePart
    text: str
    function: str = ""
    """Name of the function at the beginning of a call, which has no text."""


class MessageReader:
    """Reader of one answer's messages."""

    def __init__(self, opened: str, has_reasoning: bool, names: Set[str]) -> None:
        """Create a reader. `opened` is the text of the message that the prompt has begun. Without reasoning,
        it is content. Calls of functions that are not in `names` are content."""
        self._opened = opened
        self._has_reasoning = has_reasoning
        self._names = names
        self._source = TextSource()
        self._texts: list[MessageText] = []
        self.part = self._find_part(opened) if harmony.MESSAGE in opened else MessagePart.HEADER
        """Part to which the next text belongs."""
        self._reader = self._read()
        next(self._reader)

    def push(self, text: str) -> list[MessageText]:
        """Add `text`, and return the texts that are now certain."""
        self._source.feed(text)
        next(self._reader)
        return self._take_texts()

    def flush(self) -> list[MessageText]:
        """End the text, and return the remaining texts."""
        self._source.is_ended = True
        for _ in self._reader:
            raise AssertionError("a reader does not wait after the end")
        return self._take_texts()

    def _take_texts(self) -> list[MessageText]:
        texts = self._texts
        self._texts = []
        return texts

    def _emit(self, text: str) -> None:
        if text:
            self._texts.append(MessageText(self.part, text))

    def _take_held(self) -> str:
        text = "".join(self._source.held)
        self._source.held.clear()
        return text

    def _read(self) -> Wait[None]:
        header = self._opened
        if self.part is MessagePart.HEADER and not (yield from self._begins_header()):
            # The model writes no messages.
            self.part = MessagePart.CONTENT
            self._emit_held()
        while True:
            if self.part is MessagePart.HEADER:
                header = yield from self._read_header(header)
                if harmony.MESSAGE not in header:
                    return
                self._begin_body(header)
            if not (yield from self._read_body()):
                return
            self.part = MessagePart.HEADER
            header = self._emit_held()

    def _begins_header(self) -> Wait[bool]:
        source = self._source
        yield from source.skip_space()
        return (yield from source.has_any((*harmony.MARKS, harmony.RECIPIENT))) is not None

    def _read_header(self, begin: str) -> Wait[str]:
        """Read a header up to the mark of its body, or to the end. Return its text."""
        header = begin + self._emit_held()
        while not header.endswith(harmony.MESSAGE):
            mark = yield from self._next_mark()
            if mark is None:
                return header
            text = self._emit_held()
            header = mark if mark in (harmony.START, *_ENDS) else header + text
        return header

    def _emit_held(self) -> str:
        text = self._take_held()
        self._emit(text)
        return text

    def _next_mark(self) -> Wait[str | None]:
        """Hold the text up to and including the next mark. Return None if the text ends without one."""
        source = self._source
        while True:
            source.held.append(source.take_before(_MARK_BEGIN))
            if (mark := (yield from source.has_any(harmony.MARKS))) is not None:
                return mark
            if not source.has_next(_MARK_BEGIN) and source.is_ended:
                source.held.append(source.take_all())
                self._emit_held()
                return None

    def _begin_body(self, header: str) -> None:
        self.part = self._find_part(header)
        if self.part is MessagePart.CALL:
            self._texts.append(MessageText(self.part, "", harmony.find_function(header)))

    def _read_body(self) -> Wait[bool]:
        """Read a body, and hold the mark after it. Return False if the text ends without one."""
        source = self._source
        while True:
            self._emit(source.take_before(_MARK_BEGIN))
            if (yield from source.has_any(harmony.MARKS)) is not None:
                return True
            if source.has_next(_MARK_BEGIN):
                self._emit_held()
            elif source.is_ended:
                self._emit(source.take_all())
                return False

    def _find_part(self, header: str) -> MessagePart:
        if harmony.find_function(header) in self._names:
            return MessagePart.CALL
        is_reasoning = self._has_reasoning and harmony.find_channel(header) == harmony.REASONING
        return MessagePart.REASONING if is_reasoning else MessagePart.CONTENT


class MessageParser:
    """Parser of one answer, like `AnswerParser`."""

    def __init__(self, opened: str, has_reasoning: bool, names: Set[str]) -> None:
        self._reader = MessageReader(opened, has_reasoning, names)
        self._has_arguments = True

    @property
    def is_reasoning(self) -> bool:
        """True while the text is reasoning."""
        return self._reader.part is MessagePart.REASONING

    def push(self, text: str) -> list[Piece]:
        """Add `text`, and return the pieces that are now certain."""
        return self._convert(self._reader.push(text))

    def flush(self) -> list[Piece]:
        """End the text, and return the remaining pieces."""
        return [*self._convert(self._reader.flush()), *self._complete()]

    def _convert(self, texts: list[MessageText]) -> list[Piece]:
        pieces: list[Piece] = []
        for part, text, function in texts:
            if part is not MessagePart.CALL or function:
                pieces += self._complete()
            if function:
                self._has_arguments = False
                pieces.append(CallBegin(function))
            elif part is MessagePart.CALL:
                self._has_arguments = True
                pieces.append(CallArguments(text))
            elif part is not MessagePart.HEADER:
                pieces.append((ReasoningText if part is MessagePart.REASONING else ContentText)(text))
        return pieces

    def _complete(self) -> list[Piece]:
        """Return arguments for a call whose body is empty."""
        has_arguments = self._has_arguments
        self._has_arguments = True
        return [] if has_arguments else [CallArguments(NO_ARGUMENTS)]


class MessageScope:
    """Splits one answer's text into spans, like `ContentScope`. Nothing is content from the first call on."""

    def __init__(self, opened: str, has_reasoning: bool, names: Set[str]) -> None:
        self._reader = MessageReader(opened, has_reasoning, names)
        self._has_called = False

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add `text`, and return the spans that are now certain."""
        return self._convert(self._reader.push(text))

    def flush(self) -> list[tuple[str, bool]]:
        """End the text, and return the remaining spans."""
        return self._convert(self._reader.flush())

    def _convert(self, texts: list[MessageText]) -> list[tuple[str, bool]]:
        spans = []
        for part, text, _ in texts:
            self._has_called |= part is MessagePart.CALL
            if text:
                spans.append((text, part is MessagePart.CONTENT and not self._has_called))
        return spans
