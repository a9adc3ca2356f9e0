"""Finds the parts of an answer in which stop sequences apply: content, but not reasoning or tool calls."""

from collections.abc import Set

from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.answers.pieces import ContentText
from tgis.router.chat.answers.text_source import TextSource, Wait
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat

Span = tuple[str, bool]
"""Part of an answer's text, and whether it is searched for stop sequences."""


class ContentScope:
    """Splits one answer's text, including marks and white space, into spans. The spans do not depend on the
    pieces in which the text arrives.

    Nothing is content from the first call on."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        begins_in_reasoning: bool,
        tools: ToolFormat | None,
        names: Set[str],
    ) -> None:
        """Create a scope from the arguments of AnswerParser."""
        self._reasoning = reasoning
        self._is_reasoning = begins_in_reasoning
        self._tools = tools
        self._names = names
        self._source = TextSource()
        self._spans: list[Span] = []
        self._reader = self._read()
        next(self._reader)

    def push(self, text: str) -> list[Span]:
        """Add `text`, and return the spans that are now certain."""
        self._source.feed(text)
        next(self._reader)
        return self._take_spans()

    def flush(self) -> list[Span]:
        """End the text, and return the remaining spans."""
        self._source.is_ended = True
        for _ in self._reader:
            raise AssertionError("a reader does not wait after the end")
        return self._take_spans()

    def _take_spans(self) -> list[Span]:
        spans = self._spans
        self._spans = []
        return spans

    def _emit(self, text: str, is_content: bool) -> None:
        if text:
            self._spans.append((text, is_content))

    def _emit_held(self, is_content: bool) -> None:
        self._emit("".join(self._source.held), is_content)
        self._source.held.clear()

    def _read(self) -> Wait[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools is None:
            yield from self._read_rest(is_content=True)
        elif self._tools.trigger is None:
            is_content = yield from self._read_begin(self._tools)
            yield from self._read_rest(is_content)
        else:
            yield from self._read_to(self._tools.trigger, is_content=True)
            yield from self._read_rest(is_content=False)

    def _read_reasoning(self, format: ReasoningFormat) -> Wait[None]:
        source = self._source
        if not self._is_reasoning:
            yield from source.skip_space()
            if not (yield from source.has(format.begin)):
                return  # the white space is held
            self._emit_held(is_content=False)
        yield from self._read_to(format.end, is_content=False)
        yield from source.skip_space()
        self._emit_held(is_content=False)

    def _read_to(self, mark: str, is_content: bool) -> Wait[None]:
        """Read up to and including the mark, which is not content, or to the end."""
        source = self._source
        self._emit_held(is_content)
        while True:
            self._emit(source.take_before(mark), is_content)
            if source.has_next(mark):
                self._emit_held(is_content=False)
                return
            if source.is_ended:
                return
            yield

    def _read_begin(self, tools: ToolFormat) -> Wait[bool]:
        """Read until the answer is known to be calls or content. Return True for content."""
        source = self._source
        parser = AnswerParser(None, False, tools, self._names)
        text = ""
        held = source.held
        source.held = []
        while True:
            new = "".join(held) + source.take_all()
            text += new
            held = []
            pieces = parser.flush() if source.is_ended else parser.push(new)
            if pieces or source.is_ended:
                is_content = not pieces or isinstance(pieces[0], ContentText)
                self._emit(text, is_content)
                return is_content
            yield

    def _read_rest(self, is_content: bool) -> Wait[None]:
        self._emit_held(is_content)
        while True:
            self._emit(self._source.take_all(), is_content)
            if self._source.is_ended:
                return
            yield
