"""Parses a text, which arrives in pieces of any size, into the parts of an answer."""

from collections.abc import Set

from tgis.router.chat.answers.call_reader import CallReader
from tgis.router.chat.answers.pieces import ContentText, Piece, ReasoningText
from tgis.router.chat.answers.text_source import SPACE, TextSource, Wait
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat


class AnswerParser:
    """Parser of one answer. The joined result does not depend on how the text is split."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        begins_in_reasoning: bool = False,
        tools: ToolFormat | None = None,
        names: Set[str] = frozenset(),
        texts: Set[tuple[str, str]] = frozenset(),
    ) -> None:
        """Create a parser. Without a format, its marks are content. `begins_in_reasoning` means that the
        prompt has begun the reasoning. Calls of functions that are not in `names` are content. `texts` are
        the functions and parameters whose values are texts."""
        self.is_reasoning = begins_in_reasoning
        """True while the text is reasoning."""
        self._reasoning = reasoning
        self._tools = tools
        self._pieces: list[Piece] = []
        self._source = TextSource()
        self._is_after_call = False
        self._texts = texts
        self._reader = self._read(names)
        next(self._reader)

    def push(self, text: str) -> list[Piece]:
        """Add `text`, and return the pieces that are now certain."""
        self._source.feed(text)
        next(self._reader)
        return self._take_pieces()

    def flush(self) -> list[Piece]:
        """End the text, and return the remaining pieces."""
        self._source.is_ended = True
        for _ in self._reader:
            raise AssertionError("a reader does not wait after the end")
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _emit(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def _read(self, names: Set[str]) -> Wait[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools is None:
            yield from self._read_plain()
            return
        calls = CallReader(self._tools, names, self._source, self._emit, self._texts)
        trigger = self._tools.trigger
        if trigger is None:
            yield from self._read_only_calls(self._tools, calls)
            return
        while (yield from self._read_content(trigger, self._tools.has_end)):
            yield from self._read_calls(self._tools, calls)

    def _read_reasoning(self, format: ReasoningFormat) -> Wait[None]:
        source = self._source
        if not self.is_reasoning:
            yield from source.skip_space()
            if not (yield from source.has(format.begin)):
                return
            if format.label:
                yield from source.has(format.label)
            source.held.clear()
            self.is_reasoning = True
        while True:
            if text := source.take_before(format.end):
                self._emit(ReasoningText(text))
            if source.has_next(format.end):
                break
            if source.is_ended:
                return
            yield
        self.is_reasoning = False
        yield from source.skip_space()
        source.held.clear()

    def _read_plain(self) -> Wait[None]:
        """Read content to the end of the text."""
        source = self._source
        text = "".join(source.held)
        while True:
            text += source.take_all()
            if text:
                self._emit(ContentText(text))
            if source.is_ended:
                return
            yield
            text = ""

    def _read_content(self, trigger: str, keeps_rest: bool) -> Wait[bool]:
        """Read content up to the trigger, and hold the trigger. Return False if the text ends without it."""
        source = self._source
        while True:
            text = source.take_before(trigger)
            if keeps_rest or not self._is_after_call:
                self._emit_content(text)
            if source.has_next(trigger):
                return True
            if source.is_ended:
                self._emit_space()
                return False
            yield

    def _read_calls(self, format: ToolFormat, calls: CallReader) -> Wait[None]:
        """Read the calls after the trigger. Text that is no call is content."""
        source = self._source
        begin, end = format.section
        separator = format.between.strip(SPACE)
        before = format.call[0] if begin else format.call[0][1:]
        has_more = yield from source.has_all(begin[1:])
        while has_more and (yield from source.has_all(before)) and (yield from calls.read()):
            self._is_after_call = True
            if end and (yield from source.has_all(end, may_be_cut=True)):
                source.held.clear()
                return
            has_more = bool(end) and (yield from source.has_all((separator,)))
        self._give_back()

    def _read_only_calls(self, format: ToolFormat, calls: CallReader) -> Wait[None]:
        """Read an answer that consists of calls, or else is content."""
        source = self._source
        yield from source.has_all((format.optional_mark,))
        yield from source.skip_space()
        if not (yield from source.has_all(format.section[0])):
            yield from self._read_plain()
            return
        while (yield from calls.read()):
            is_end = not (yield from source.has_all((format.between.strip(SPACE),)))
            yield from source.skip_space()
            if is_end or not (yield from calls.may_begin()):
                yield from self._drop_rest()
                return
        yield from self._read_plain()

    def _drop_rest(self) -> Wait[None]:
        while not self._source.is_ended:
            self._source.take_all()
            yield

    def _give_back(self) -> None:
        """Emit the held text as content, because it is not a call."""
        text = "".join(self._source.held)
        self._source.held.clear()
        if text.strip(SPACE):
            self._is_after_call = False
        self._emit_content(text)

    def _emit_content(self, text: str) -> None:
        """Emit content, and hold the white space at its end, which is not content if a call follows."""
        held = self._source.held
        content = text.rstrip(SPACE)
        if content:
            self._is_after_call = False
            self._pieces.append(ContentText("".join((*held, content)) if held else content))
            held.clear()
        if len(content) < len(text):
            held.append(text[len(content) :])

    def _emit_space(self) -> None:
        """Emit the held white space, unless it follows calls."""
        if self._source.held and not self._is_after_call:
            self._emit(ContentText("".join(self._source.held)))
