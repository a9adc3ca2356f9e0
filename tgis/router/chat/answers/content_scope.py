"""Parts of an answer in which stop sequences end it: the content, not reasoning or calls of tools."""

from collections.abc import Set

from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.answers.pieces import ContentText
from tgis.router.chat.answers.text_source import TextSource, Wait
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat

Span = tuple[str, bool]
"""Part of an answer's text, and whether stop sequences are looked for in it."""


class ContentScope:
    """Divides one answer's text, marks and white space included, into spans, which do not depend on how
    the text is split into parts.

    From the first call on, nothing is content."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        begins_in_reasoning: bool,
        tools: ToolFormat | None,
        names: Set[str],
    ) -> None:
        """Create a scope; the arguments are those of AnswerParser."""
        self._reasoning, self._is_reasoning = reasoning, begins_in_reasoning
        self._tools, self._names = tools, names
        self._source = TextSource()
        self._spans: list[Span] = []
        self._reader = self._read()
        next(self._reader)

    def push(self, text: str) -> list[Span]:
        """Return the spans that are certain once `text` has come."""
        self._source.feed(text)
        next(self._reader)
        return self._take_spans()

    def flush(self) -> list[Span]:
        """Return the rest of the spans, because the text ends here."""
        self._source.is_ended = True
        for _ in self._reader:
            raise AssertionError("a reader does not wait after the end")
        return self._take_spans()

    def _take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
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
        """Read up to the mark, which is no content, or to the end."""
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
        """Read until it is certain whether the answer is calls or content. Return True for content."""
        source, parser, text = self._source, AnswerParser(None, False, tools, self._names), ""
        source.held, held = [], source.held
        while True:
            new = "".join(held) + source.take_all()
            text, held = text + new, []
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
